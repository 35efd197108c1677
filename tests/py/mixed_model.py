"""A toy model with all that a plan may do: streams that are split, whole, gathered and split again."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from toy_model import Processor

from cp_attn import ContextParallelInput as In
from cp_attn import ContextParallelOutput as Out

PLAN = {"": {"hidden": In(1, 3)}, "middle": Out(1, 3), "second": {"hidden": In(1, 3)}, "head": Out(1, 3)}


class Attention(nn.Module):
    """Attention of one stream to another, or to itself."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))
        self.heads, self.processor = 3, Processor(3)

    def forward(self, hidden, keys):
        return self.processor(self.q(hidden), self.k(keys), self.v(keys))


class Mixed(nn.Module):
    """The text is whole on every rank; the hidden rows are scanned in the middle, so must be whole there."""

    def __init__(self, checkpoints=None):
        super().__init__()
        self.enter, self.read = nn.Linear(6, 12), nn.Linear(6, 12)
        self.first, self.second, self.third, self.fourth = (Attention() for _ in range(4))
        self.middle, self.after = nn.Linear(12, 12), nn.Linear(12, 12)
        self.head, self.tail = nn.Linear(12, 3), nn.Linear(12, 2)
        self.checkpoints = checkpoints  # None, or use_reentrant

    def forward(self, hidden, text):
        hidden, text = self.enter(hidden), self.read(text)
        if self.checkpoints is None:
            hidden, text = self.block(hidden, text)
        else:
            hidden, text = checkpoint(self.block, hidden, text, use_reentrant=self.checkpoints)
        return {"hidden": self.head(hidden), "others": [self.tail(text), "a note"]}

    def block(self, hidden, text):
        hidden = hidden + self.first(hidden, hidden)  # split queries, split keys
        whole = self.after(self.middle(hidden).cumsum(1)).tanh()
        text = text + whole.mean(1, keepdim=True)
        hidden = hidden + self.second(whole, text)  # split again; whole keys
        text = text + self.third(text, hidden)  # whole queries, split keys
        return hidden, text + self.fourth(text, text)  # whole queries, whole keys


class Local(nn.Module):
    """One attention; what a plan without an output entry leaves split."""

    def __init__(self):
        super().__init__()
        self.enter, self.first, self.head = nn.Linear(6, 12), Attention(), nn.Linear(12, 3)

    def forward(self, hidden):
        hidden = self.enter(hidden)
        return self.head(hidden + self.first(hidden, hidden))


def make(cls, *args):
    """Return a model and what it takes, in float64, the same on every rank."""
    torch.manual_seed(5)
    model = cls(*args).double()
    inputs = [torch.randn(2, rows, 6, dtype=torch.float64).requires_grad_() for rows in (11, 4)]
    return model, inputs[: 1 if cls is Local else 2]


def loss_of(out):
    """Return a loss that is no linear function of any output."""
    found = [out] if torch.is_tensor(out) else [out["hidden"], out["others"][0]]
    return sum((x * torch.linspace(0.5, 2.0, x.shape[-1], dtype=x.dtype)).pow(2).sum() for x in found)
