"""The report: what its notebook calls (:mod:`.contents`), and how it becomes one file (:mod:`.export`)."""
