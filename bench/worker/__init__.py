"""Inside a worker process, which builds, checks and times a case.

| module | what it does |
|---|---|
| `serve`, `worker` | where such a process begins, and what it does with a case |
| `protocol` | what it is asked and answers |
| `correctness` | output and gradients against float64 |
| `memory` | the peak memory of a call |
| `clock` | times a call |
| `sustained` | what a call takes and draws once clocks and power have settled |
| `noise` | what else the machine did meanwhile |
| `autotuning` | how Triton's autotuners choose here |
| `models` | the models of mode train |
| `vector_rate` | a kernel that only multiplies and adds |
"""
