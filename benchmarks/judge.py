"""Whether rows compute the same attention: what torch says, and how far a row's answers are from it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .shapes import cut

ANSWERS = ("out", "dq", "dk", "dv")
# Of an answer, relative to its largest element.
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}


def gathered(value):
    """Everybody's value, in the order of the ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def reference(problem):
    """out, or out, dq, dk and dv, whole and in float32, by torch: every rank computes its rows of out."""
    q, k, v = (x.float() for x in problem.whole[:3])
    q = q.narrow(1, problem.first, problem.count)
    leaves = [x.detach().requires_grad_(problem.is_backward) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves)).transpose(1, 2)
    if not problem.is_backward:
        return [whole_of(out, problem)]
    dq, dk, dv = torch.autograd.grad(out, leaves, problem.own()[3].float())
    for part in (dk, dv):
        dist.all_reduce(part)
    return [whole_of(out.detach(), problem), whole_of(dq, problem), dk, dv]


def whole_of(part, problem):
    """All ranks' rows, in their order."""
    shape = list(part.shape)
    pieces = []
    for rank, shape[1] in enumerate(cut(problem.tokens, problem.world)):
        piece = part.contiguous() if rank == problem.rank else part.new_empty(shape)
        dist.broadcast(piece, rank)
        pieces.append(piece)
    return torch.cat(pieces, 1)


def errors_of(answers, wanted, first):
    """{answer: its largest difference on this rank, whose rows begin at `first`, relative to the largest element}."""
    errors = dict.fromkeys(ANSWERS[: len(wanted)], 0.0)
    for name, answer, whole in zip(errors, answers, wanted, strict=bool(answers)):
        rows = whole.narrow(1, first, answer.shape[1])
        if answer.shape != rows.shape:
            raise ValueError(f"{name} has the shape {tuple(answer.shape)} instead of {tuple(rows.shape)}")
        error = float((answer.float() - rows).abs().max() / whole.abs().max())
        errors[name] = error if error == error else float("inf")
    return errors


def judge(row, answers, wanted, tolerance):
    """(largest error on any rank, None, or what is wrong); the ranks' answers together must be whole."""
    own = errors_of(answers, wanted, row.first), answers[0].shape[1] if answers else 0
    everybody = gathered(own)
    rows, tokens = sum(rows for _, rows in everybody), row.problem.tokens
    worst = {name: max(errors[name] for errors, _ in everybody) for name in own[0]}
    if rows != tokens:
        return None, f"wrong: it answers for {rows:,} rows of {tokens:,}"
    wrong = [f"{name} by {error:.0e}" for name, error in worst.items() if error > tolerance]
    told = f"wrong, relative to the largest element: {', '.join(wrong)}" if wrong else None
    return max(worst.values()), told
