"""What the commands print.

| module | what it does |
|---|---|
| `display` | tables, JSON and CSV; what follows a sweep |
| `choice` | what the commands best, chunk-size and predict say |
| `inventory` | what the commands kernels, presets, gpus and doctor list |
| `shown` | what the commands compare, check, profile, count and reproduce print |
"""
