"""A model of one attention through diffusers' dispatcher, with q = 0: every output row is the mean of its values."""

from dataclasses import dataclass

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import nn


class Processor:
    """What a diffusers processor has: a backend, a config, and a call of the dispatcher."""

    _attention_backend = None
    _parallel_config = None

    def __init__(self, heads=2, **call):
        self.heads, self.call = heads, call

    def __call__(self, query, keys, values):
        query, keys, values = (x.unflatten(-1, (self.heads, -1)) for x in (query, keys, values))
        config = dict(parallel_config=self._parallel_config, backend=self._attention_backend)
        return dispatch_attention_fn(query, keys, values, **config | self.call).flatten(2)


class Attention(nn.Module):
    """Keys of its own or passed; angles, where passed, are added to the values."""

    def __init__(self, heads=2, **call):
        super().__init__()
        self.heads = heads
        self.processor = Processor(heads, **call)

    def forward(self, hidden, keys=None, angles=None):
        keys = hidden if keys is None else keys
        values = keys if angles is None else keys * angles
        return self.processor(torch.zeros_like(hidden), keys, values)


class Positions(nn.Module):
    """Two tables over the rows."""

    def forward(self, hidden):
        rows = 1.0 + torch.arange(hidden.shape[1])[:, None].expand(-1, hidden.shape[2])
        return rows, 2 * rows


class Head(nn.Module):
    """Returns what it is told to: a tensor, a tuple, a dict, a dataclass."""

    def forward(self, hidden, kind):
        made = {
            "tensor": hidden,
            "tuple": (hidden, "note"),
            "list": [hidden, None],
            "dict": {"sample": hidden, "note": None},
            "record": Record(hidden, "note"),
        }
        return made[kind]


@dataclass
class Record:
    """An output that is no tuple."""

    sample: torch.Tensor
    note: str


class Toy(nn.Module):
    """One attention; `parts`, a tensor or a list, are more streams in front of the hidden one."""

    def __init__(self, heads=2, **call):
        super().__init__()
        self.attention = Attention(heads, **call)
        self.positions = Positions()
        self.head = Head()

    def forward(self, hidden, parts=None, keys=None, bias=None, kind="tensor", turn=False):
        angles = self.positions(hidden)[1] if turn else None
        parts = [parts] if torch.is_tensor(parts) else parts or []
        joint = torch.cat([*(x for x in parts if torch.is_tensor(x)), hidden], 1)
        out = self.attention(joint, keys, angles)[:, joint.shape[1] - hidden.shape[1] :]
        return self.head(out if bias is None else out + bias, kind)


class Local(nn.Module):
    """A model whose attention never comes to the dispatcher."""

    def forward(self, hidden):
        return nn.functional.scaled_dot_product_attention(hidden, hidden, hidden)
