"""Context parallelism for diffusers models: plans, hooks, and the way into their attention.

`enable` is the entry. It reads a plan (`plan`, `plans`), finds its modules (`resolve`), and puts down hooks (`hooks`)
that cut and gather tensors (`exchange`); `dispatch` and `processors` lead the attention calls here.
"""
