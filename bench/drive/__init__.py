"""From cases to rows.

| module | what it does |
|---|---|
| `session` | what the commands sweep, verify, calibrate, compare and profile do around a measurement |
| `run` | runs a sweep, cases side by side, or cases of a run again |
| `compile_ahead` | compiles the next cases while nothing is timed |
| `estimate`, `progress` | how long cases will take, and how far they are |
| `executors`, `ray` | which worker runs which case, on this machine or a cluster |
| `workers` | starts, asks, ends and replaces worker processes |
| `derived` | a worker's outcome -> a row |
| `calibrate` | the rates that the device reaches |
| `bars` | the project's speed bars, claims that are measured |
| `own_function`, `own_case` | a function of a user's: what it does, on the roofline; as a row |
| `profiling`, `ncu` | hardware counters by Nsight Compute |
| `mlp_errors` | numerical errors of the gated MLP, for `reproduce --run` |
| `complete` | `reproduce --run`, `results --run`: measures what claims of documents or a complete set of results lack |
"""
