"""How one model is spread over devices: plans and their rules, wrapping, pipelines."""
