"""How it is measured. Standard output is for data: what a person is told goes to standard error.

| module | what it does |
|---|---|
| *which cases* | |
| `presets` | named sets of axes |
| `plan` | a request's axes -> cases |
| `estimate` | how long cases will take |
| *from cases to rows* | |
| `session` | what the commands sweep, verify, calibrate, compare and profile do around a measurement |
| `run` | runs a sweep, cases side by side, or cases of a run again |
| `compile_ahead` | compiles the next cases while nothing is timed |
| `executors`, `ray` | which worker runs which case, on this machine or a cluster |
| `derived` | a worker's outcome -> a row |
| *worker processes* | |
| `workers` | starts, asks, ends and replaces them |
| `serve`, `worker` | where such a process begins, and what it does with a case |
| `correctness` | output and gradients against float64 |
| `memory` | the peak memory of a call |
| `clock` | times a call |
| `sustained` | what a call takes and draws once clocks and power have settled |
| `noise` | what else the machine did meanwhile |
| `environment` | device and versions; which rows this code's are |
| `autotuning` | how Triton's autotuners choose in a worker |
| `models` | the models of mode train |
| *commands that measure something else* | |
| `calibrate`, `vector_rate` | the rates that the device reaches |
| `bars` | the project's speed bars, claims that are measured |
| `own_function` | a function of a user's on the roofline |
| `profiling`, `ncu` | hardware counters by Nsight Compute |
| `mlp_errors` | numerical errors of the gated MLP, for `reproduce --run` |
| `complete` | `reproduce --run`, `results --run`: measures what claims of documents or a complete set of results lack |
| *answers and output* | |
| `choice` | the commands best, chunk-size and predict |
| `inventory` | what the commands kernels, presets, gpus and doctor list |
| `display` | tables, JSON, CSV and progress |
| `shown` | what the commands compare, check, profile, count and reproduce print |
"""

import sys


def note(*lines: str) -> None:
    """Print lines for people on standard error."""
    for line in lines:
        print(line, file=sys.stderr)
