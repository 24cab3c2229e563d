"""How long a case takes, as measured or as a model says.

Begin with :mod:`.answers`, what the commands best, chunk-size and predict say; :mod:`.prediction` is a time with its
interval. :mod:`.terms` has the models that :mod:`.fit` fits to measured rows; :mod:`.validation` says how good they
are. Nothing is fitted in :mod:`.runtime_model`, the roofline and the paper's model, and in :mod:`.chunk_size`, the
optima in closed form.
"""
