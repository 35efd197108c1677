"""Kinds of fault that users of context-parallel attention have met, each on every variant, on 2, 3, 4 and 6 ranks.

Three probes have answers that can be worked out by hand. The mean probe: q = 0, so that a row is the mean of the values
that it may see, and its LSE the logarithm of their number. The peak probe: one key far above or below the others. The
head probe: every kv head has its own number. Everything else is judged against float64, by what the plain method in the
same dtype is off.
"""

import contextlib
import functools
import itertools
import math

import pytest
from thread_ranks import Ranks

torch = pytest.importorskip("torch")

import cp_attn  # noqa: E402

H = 12  # divided by every number of ranks here


def _variants():
    """Yield (name, world, config): both factors in every order, strict and with the flag for any length."""
    for flag in ("", "_anything"):
        for world in (2, 3, 4, 6):
            for kind in ("ring", "ulysses"):
                config = {f"{kind}_degree": world} | ({f"{kind}{flag}": True} if flag else {})
                yield f"{kind}{flag}{world}", world, config
        for ring, ulysses in ((2, 2), (3, 2), (2, 3)):
            config = dict(ring_degree=ring, ulysses_degree=ulysses) | ({"unified_anything": True} if flag else {})
            yield f"unified{flag}{ring}x{ulysses}", ring * ulysses, config


VARIANTS = {name: (world, config) for name, world, config in _variants()}
STRICT = [name for name in VARIANTS if "anything" not in name]
ANYTHING = [name for name in VARIANTS if "anything" in name]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def group(request):
    """The ranks of one variant, kept for all of its tests: what one of them provokes must not harm the next."""
    world, config = VARIANTS[request.param]
    with Ranks(world, **config) as ranks:
        ranks.is_anything = request.param in ANYTHING
        yield ranks
        x = torch.ones(1, 1, H, 1)
        assert all(out.equal(x) for out in ranks.attention(*[[x] * world] * 3))


every = pytest.mark.parametrize("group", VARIANTS, indirect=True, scope="module")
strict = pytest.mark.parametrize("group", STRICT, indirect=True, scope="module")
anything = pytest.mark.parametrize("group", ANYTHING, indirect=True, scope="module")


def lengths_of(group):
    """Return lists of local lengths: even ones, and every odd kind where the variant takes them."""
    world = group.world
    found = [[n] * world for n in (1, 2, 5)]
    if group.is_anything:
        found += [[len(x) for x in torch.arange(n).tensor_split(world)] for n in (5, 7, 11)]  # 11 over 4: 3, 3, 3, 2
        found += [[2, 3] + [2] * (world - 2), [3, 2] + [1] * (world - 2), [1] * (world - 1) + [4]]
        found += [[0] * (world - 1) + [4], [4] + [0] * (world - 1), [2, 2, 1, 0, 0, 0][:world], [1, 0] * (world // 2)]
        found = [x + [0] * (world - len(x)) for x in found]
    return found


def cut(x, lengths, dim=1):
    return x.split(lengths, dim)


def attend(group, q, k, v, lengths, kv_lengths=None, **keywords):
    """Return (out, lse) of the whole; keyword values that are lists have one element a rank."""
    parts = [cut(q, lengths), cut(k, kv_lengths or lengths), cut(v, kv_lengths or lengths)]
    found = group.attention(*parts, return_lse=True, **keywords)
    for rank, (out, lse) in enumerate(found):
        assert out.shape == (*parts[0][rank].shape[:3], v.shape[3]) and out.dtype == q.dtype
        assert lse.shape == out.shape[:3]
        assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    return tuple(torch.cat(x, 1) for x in zip(*found, strict=True))


def near(got, want, dtype=torch.float32):
    """Compare with what was worked out by hand: within a few roundings."""
    want = torch.as_tensor(want, dtype=torch.float64).expand(got.shape)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=4 * eps, atol=4 * eps)


# --- the mean probe ---


def means(values, heads=H, dtype=torch.float32, dim=1):
    """Return q = 0, k = 0 and these values, (rows) or (batch, rows), the same for every head."""
    v = torch.as_tensor(values, dtype=dtype)
    v = v.expand(1, -1) if v.dim() == 1 else v
    v = v[:, :, None, None].expand(-1, -1, heads, dim)
    return torch.zeros_like(v), torch.zeros_like(v), v


def powers(count):
    """Values of which no two choices have the same mean; not too many for bfloat16 to hold."""
    return [2.0 ** (i % 7) + i // 7 for i in range(count)]


# A mask, given whole, or to each rank its own keys; with its own rows where it has some.
BITS, OWN = "bits", "own bits"

# what: (local lengths, values, keywords, the answer for all rows or for each one, how many keys each row sees)
BY_HAND = {
    "a zero that pads enters the softmax": ([3, 2], [1, 1, 1, 2, 2], {}, 1.4, 5),
    "one row, then four": ([1, 4], [1, 2, 2, 2, 2], {}, 1.8, 5),
    "unequal counts show a wrong base": ([1, 7], [1, 0, 0, 0, 0, 0, 0, 0], {}, 0.125, 8),
    "unequal counts by a mask": ([4, 4], [1, 9, 9, 9, 0, 0, 0, 0], {BITS: "10001111"}, 0.2, 5),
    "two ranks swap": ([1, 1], [1, 3], {}, 2.0, 2),
    "three ranks pair": ([1, 1, 1], [1, 2, 6], {}, 3.0, 3),
    "more ranks than rows": ([2, 2, 1, 0], [1, 2, 4, 8, 16], {}, 6.2, 5),
    "three ranks of four have rows": ([3, 0, 0, 1], [1, 2, 4, 8], {}, 3.75, 4),
    "four ranks see each other": ([1, 1, 1, 1], [1, 2, 4, 8], {}, 3.75, 4),
    "six ranks see each other": ([1, 1, 1, 1, 1, 1], [1, 2, 4, 8, 16, 32], {}, 10.5, 6),
    "each block its own mask": ([2, 2], [1, 2, 4, 8], {OWN: "1110"}, 7 / 3, 3),
    "padding at the very end": ([3, 2], [1, 2, 4, 8, 16], {OWN: "11110"}, 3.75, 4),
    "bits shift by one": ([3, 3, 2, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], {OWN: "1111111110"}, 4.0, 9),
    "bits shift, three ranks": ([3, 2, 2], [0, 1, 2, 3, 4, 5, 60], {OWN: "1111110"}, 2.5, 6),
    "padded text, then picture": ([4, 4], [1, 2, 10, 20, 3, 4, 30, 40], {OWN: "11110011"}, 103 / 6, 6),
    "a rank without keys": ([2, 2], [1, 3, 100, 100], {OWN: "1100"}, 2.0, 2),
    "a mask in 2 x 2": ([1, 1, 1, 1], [1, 2, 4, 8], {OWN: "1011"}, 13 / 3, 3),
    "causal": ([2, 2], [1, 2, 4, 8], dict(is_causal=True), [1, 1.5, 7 / 3, 3.75], [1, 2, 3, 4]),
    "causal, four ranks": ([1, 1, 1, 1], [1, 2, 4, 8], dict(is_causal=True), [1, 1.5, 7 / 3, 3.75], [1, 2, 3, 4]),
    "causal, three rows and one": ([3, 1], [1, 2, 4, 8], dict(is_causal=True), [1, 1.5, 7 / 3, 3.75], [1, 2, 3, 4]),
    "a prefix that all see": (
        [2, 2],
        [1, 2, 4, 8],
        {OWN: "1100 1100 1110 1111"},
        [1.5, 1.5, 7 / 3, 3.75],
        [2, 2, 3, 4],
    ),
    "rows that see later keys": ([3, 1], [1, 2, 4, 8], {BITS: "0001 1000 0000 1010"}, [8, 1, 0, 2.5], [1, 1, 0, 2]),
    "causal with a hole": ([2, 2], [1, 2, 4, 8], {"is_causal": True, BITS: "1011"}, [1, 1, 2.5, 13 / 3], [1, 1, 2, 3]),
}


def _by_hand():
    for what, row in BY_HAND.items():
        for name in STRICT + ANYTHING:
            if VARIANTS[name][0] == len(row[0]) and (name in ANYTHING or len(set(row[0])) == 1):
                yield pytest.param(name, what, id=f"{name}-{what}")


@pytest.mark.parametrize("group, what", list(_by_hand()), indirect=["group"], scope="module")
def test_by_hand(group, what):
    lengths, values, keywords, rows, counts = BY_HAND[what]
    keywords = dict(keywords)
    for name in (BITS, OWN):
        if name in keywords:
            bits = torch.tensor([[c == "1" for c in row] for row in keywords.pop(name).split()])
            bits = bits if len(bits) == 1 else bits[None, None]
            dim = 1 if bits.dim() == 2 else 2
            keywords["attn_mask"] = list(cut(bits, lengths, dim)) if name == OWN else bits
    for dtype, dim in itertools.product(DTYPES, (1, 64)):
        out, lse = attend(group, *means(values, dtype=dtype, dim=dim), lengths, **keywords)
        near(out, torch.tensor(rows, dtype=torch.float64).reshape(-1, 1, 1), dtype)
        near(lse, torch.tensor(counts, dtype=torch.float64).log().reshape(-1, 1))  # float32 for all of them


@every
def test_means(group):
    """All lengths, a batch whose items must not mix, and LSEs that count the keys; longer values by a wide head."""
    for lengths in lengths_of(group):
        values = torch.tensor([[10.0 * b + x for x in powers(sum(lengths))] for b in range(3)])
        for dim in (1, 3, 65):
            out, lse = attend(group, *means(values, dim=dim), lengths)
            near(out, values.double().mean(1)[:, None, None, None])
            near(lse, math.log(sum(lengths)))


@every
def test_masked_means(group):
    """Bits that differ from one item of a batch to the next, as every shape that one process takes."""
    generator = torch.Generator().manual_seed(21)
    for lengths in lengths_of(group):
        total = sum(lengths)
        bits = torch.rand(3, total, generator=generator) > 0.4
        bits[:, torch.randint(total, (1,), generator=generator)] = True
        values = torch.tensor(powers(total)).expand(3, -1)
        want = (values * bits).double().sum(1) / bits.sum(1)
        for mask in (
            bits,
            list(cut(bits, lengths)),
            bits[:, None].expand(-1, total, -1),
            bits[:, None, None],
            list(cut(bits[:, None, None], lengths, 3)),
            torch.zeros(3, 1, 1, total).masked_fill(~bits[:, None, None], -torch.inf),
        ):
            out, lse = attend(group, *means(values), lengths, attn_mask=mask)
            near(out, want[:, None, None, None])
            near(lse, bits.sum(1).double().log()[:, None, None])
        # One item for all of the batch, and one row for everything.
        for mask in (bits[:1], bits[0]):
            out, _ = attend(group, *means(values), lengths, attn_mask=mask)
            near(out, want[0])


@every
def test_rows_and_blocks_without_keys(group):
    """All keys of a rank masked, of each in turn, count for nothing; a row without any is 0."""
    world = group.world
    lengths = [2] * world
    values = torch.tensor(powers(2 * world))
    for rank in range(world):
        bits = torch.ones(1, 2 * world, dtype=torch.bool)
        bits[:, 2 * rank : 2 * rank + 2] = False
        out, lse = attend(group, *means(values), lengths, attn_mask=list(cut(bits, lengths)))
        near(out, values[bits[0]].double().mean())
        near(lse, math.log(2 * world - 2))
    for row in range(2 * world):
        mask = torch.ones(2 * world, 2 * world, dtype=torch.bool)
        mask[row] = False
        out, lse = attend(group, *means(values), lengths, attn_mask=mask[None, None])
        others = torch.arange(2 * world) != row
        assert not out[:, row].any() and (lse[:, row] == -torch.inf).all()
        near(out[:, others], values.double().mean())
        near(lse[:, others], math.log(2 * world))
    out, lse = attend(group, *means(values), lengths, attn_mask=torch.zeros(1, 2 * world, dtype=torch.bool))
    assert not out.any() and (lse == -torch.inf).all()


@every
def test_causal_means(group):
    """Positions count over the whole; the flag is a matter of the call, not of the config or of the lengths."""
    for lengths in lengths_of(group):
        values = torch.tensor(powers(sum(lengths)))
        counts = torch.arange(1.0, sum(lengths) + 1, dtype=torch.float64)
        rows = values.double().cumsum(0) / counts
        for is_causal in (False, True, False):
            out, lse = attend(group, *means(values, dim=3), lengths, is_causal=is_causal)
            near(out, rows[:, None, None] if is_causal else values.double().mean())
            near(lse, (counts if is_causal else counts[-1:]).log()[:, None])


# --- the peak probe ---


@every
def test_one_large_score(group):
    """On every rank in turn: a naive merge overflows, and a far too low score counts for nothing."""
    for lengths in lengths_of(group)[:3]:
        total = sum(lengths)
        for dtype in DTYPES:
            _, _, v = means(powers(total), dtype=dtype)
            for peak in range(0, total, max(1, lengths[0])):
                k = torch.zeros_like(v)
                k[:, peak] = 200
                out, lse = attend(group, torch.ones_like(v), k, v, lengths, scale=1.0)
                near(out, v[0, peak, 0, 0].double())
                near(lse, 200.0)
                out, lse = attend(group, torch.ones_like(v), -k, v, lengths, scale=1.0)
                near(out, (v[0, :, 0, 0].double().sum() - v[0, peak, 0, 0].double()) / (total - 1), dtype)
                near(lse, math.log(total - 1))


@every
def test_scale_comes_from_the_true_head_dim(group):
    """One key of score 2 / sqrt(D) among keys of score 0; a scale from a padded D would show."""
    lengths = [1] * group.world
    for D in (1, 3, 4, 5, 65, 80):
        q, k = torch.zeros(2, 1, group.world, H, D)
        q[..., 0], k[:, -1, :, 0] = 1, 2
        v = torch.zeros(1, group.world, H, 1)
        v[:, -1] = 1
        weight = math.exp(2 * D**-0.5)
        out, _ = attend(group, q, k, v, lengths)
        near(out, weight / (weight + group.world - 1))
        if D == 4 and group.world == 2:
            assert abs(out[0, 0, 0, 0].item() - 0.7311) < 1e-4


# --- the head probe ---


def head_probe(group, heads, kv_heads):
    q = torch.zeros(2, 2 * group.world, heads, 3)
    k = torch.zeros(2, 2 * group.world, kv_heads, 3)
    v = torch.arange(1.0, kv_heads + 1)[:, None].expand(2, 2 * group.world, -1, 1)
    out, _ = attend(group, q, k, v, [2] * group.world, enable_gqa=heads != kv_heads)
    near(out, torch.arange(1.0, kv_heads + 1).repeat_interleave(heads // kv_heads)[:, None])


@every
def test_grouped_heads(group):
    """Every query head its own kv head's number, also where ranks share one; nothing is kept from call to call."""
    for kv_heads in (12, 1, 6, 2, 3, 4, 12, 1):
        head_probe(group, 12, kv_heads)


@anything
def test_any_number_of_heads(group):
    for heads in (1, 2, 3, 5, 7, 9, 10):
        head_probe(group, heads, heads)
    for heads, kv_heads in ((6, 3), (4, 1), (7, 1), (9, 3), (10, 5)):
        head_probe(group, heads, kv_heads)


@pytest.mark.parametrize("world", (2, 3, 4))
def test_several_configs_in_one_process(world):
    """Models of other heads on other degrees take turns: nothing is kept from the one to the other."""
    configs = (
        dict(ulysses_degree=world),
        dict(ulysses_degree=world, ulysses_anything=True),
        dict(ring_degree=world),
        dict(ulysses_degree=world),
    )
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(Ranks(world, **config)) for config in configs]
        for _ in range(2):
            for at, heads, kv_heads in ((0, 12, 12), (1, 6, 3), (0, 12, 3), (2, 5, 1), (1, 7, 7), (3, 24, 2)):
                head_probe(groups[at], heads, kv_heads)
                head_probe(groups[0], 12, 12)


@pytest.mark.parametrize("group", ["ulysses2", "ulysses3", "unified2x2"], indirect=True, scope="module")
def test_heads_that_ranks_cannot_share(group):
    """Strict Ulysses: an error on every rank, also where rows and heads change places by mistake."""
    for shape in ((2, 4, 5, 8), (2, H, 7, 8)):
        x = torch.ones(shape)
        for caught in group.errors(lambda r, x=x: cp_attn.attention(x, x, x, group.contexts[r])):
            assert type(caught) is ValueError and f"{shape[2]}" in str(caught) and "anything" in str(caught), caught


# --- anything at random, against float64 ---


def plain(q, k, v, mask=None, is_causal=False, scale=None, dtype=torch.float64):
    """Return (out, lse) by the plain method in a dtype; rows without keys give 0 and -inf."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(dtype)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
    lse = scores.masked_fill(dead, 0).logsumexp(-1, keepdim=True).masked_fill(dead, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse[..., 0].transpose(1, 2)


def judge(got, truth, yardstick, times=3):
    """Demand an error of at most so many times the yardstick's, and never less than a few roundings."""
    eps = torch.finfo(got.dtype).eps
    few = {torch.float64: 64, torch.float32: 8}.get(got.dtype, 1)

    def error(x):
        same = x.double() == truth  # both -inf
        return (x.double() - truth).masked_fill(same, 0).abs().max().item() if x.numel() else 0.0

    top = max(1.0, truth.masked_fill(truth.isinf(), 0).abs().max().item() if truth.numel() else 0.0)
    assert error(got) <= max(times * error(yardstick), few * eps * top), (error(got), error(yardstick))


def draw(generator, group):
    """Return lengths of q and k, shapes and the arguments of one random call."""

    def pick(*choices):
        return choices[torch.randint(len(choices), (), generator=generator)]

    lengths = pick(*lengths_of(group))
    is_cross, is_causal = pick(True, False), pick(True, False)
    kv_lengths = [n + pick(0, 1, 2) for n in lengths] if group.is_anything else [2 * n for n in lengths]
    kv_lengths = kv_lengths if is_cross else lengths
    heads = pick(12, 6, 5) if group.is_anything else 12
    kv_heads = pick(*(n for n in range(1, heads + 1) if heads % n == 0))
    B, s, t, D, Dv = pick(1, 2, 3), sum(lengths), sum(kv_lengths), pick(1, 3, 8, 64, 65, 128), pick(1, 5, 16, 64)
    shapes = (B, s, heads, D), (B, t, kv_heads, D), (B, t, kv_heads, Dv)
    mask = pick(None, (B, heads, s, t), (1, 1, s, t), (B, 1, 1, t), (1, heads, 1, t), (B, 1, s, t))
    kind = pick("bits", "numbers")
    return lengths, kv_lengths, shapes, mask, kind, is_causal, pick(None, 0.3)


def random_call(seed, group, dtype):
    """Return lengths, tensors, what `plain` takes beside, and what `attend` takes beside."""
    generator = torch.Generator().manual_seed(seed)
    lengths, kv_lengths, shapes, mask, kind, is_causal, scale = draw(generator, group)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    more, mine = dict(is_causal=is_causal, scale=scale), {}
    if mask is not None:
        mask = torch.randn(mask, generator=generator, dtype=torch.float64)
        mask = mask > -0.3 if kind == "bits" else mask.to(dtype)
        more["mask"] = mine["attn_mask"] = mask
        if mask.shape[2] > 1 and seed % 2:
            mine["attn_mask"] = list(cut(mask, lengths, 2))  # each rank its own rows
    mine |= dict(is_causal=is_causal, scale=scale, enable_gqa=True)
    return lengths, kv_lengths, tensors, more, mine


def judge_call(group, dtype, seed):
    """Make a random call and judge its answer."""
    lengths, kv_lengths, tensors, more, mine = random_call(seed, group, dtype)
    truth = plain(*tensors, **more)
    half = torch.finfo(dtype).bits == 16  # there the plain method computes in float32 and rounds once
    yardstick = plain(*tensors, **more, dtype=torch.float32 if half else dtype)
    out, lse = attend(group, *tensors, lengths, kv_lengths, **mine)
    judge(out, truth[0], yardstick[0].to(dtype))
    judge(lse if dtype == torch.float64 else lse.to(dtype), truth[1], yardstick[1].to(dtype))


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_anything_at_random(group, dtype):
    """Lengths, shapes, masks, order, heads, scale: on every number of ranks within the error of one process."""
    for seed in range(10):
        judge_call(group, dtype, seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512bf16", "avx512"])
def test_every_kernel(isa, dtype, monkeypatch):
    """What one block leaves for the next, and the LSE: the same of every kernel, and for every head dim."""
    monkeypatch.setenv("CP_ATTN_ISA", isa)
    for variant in ("ring_anything3", "ulysses_anything2", "unified_anything2x2"):
        try:
            ranks = Ranks(VARIANTS[variant][0], **VARIANTS[variant][1])
        except ValueError as error:
            if "this machine allows" not in str(error):
                raise
            pytest.skip(str(error))
        with ranks:
            for dim in (1, 3, 8, 64, 65, 128):
                lengths = [1, 7, 2, 0][: ranks.world]
                values = powers(sum(lengths))
                counts = torch.arange(1.0, sum(lengths) + 1, dtype=torch.float64)
                out, lse = attend(ranks, *means(values, dtype=dtype, dim=dim), lengths)
                near(out, torch.tensor(values).double().mean(), dtype)
                near(lse, math.log(sum(lengths)))
                out, lse = attend(ranks, *means(values, dtype=dtype, dim=dim), lengths, is_causal=True)
                near(out, (torch.tensor(values).double().cumsum(0) / counts)[:, None, None], dtype)
                near(lse, counts.log()[:, None])
            ranks.is_anything = True
            for seed in range(4):
                judge_call(ranks, dtype, 200 + seed)


@every
def test_garbage_does_not_outlive_its_call(group):
    """NaN through every buffer of a call and its backward, outputs filled with NaN by torch: the next call is right."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # which fills what `empty` returns
    try:
        for seed in range(6):
            lengths, kv_lengths, tensors, _, mine = random_call(300 + seed, group, torch.float32)
            rows = lengths, kv_lengths, kv_lengths
            parts = [cut(torch.full_like(x, torch.nan), n) for x, n in zip(tensors, rows, strict=True)]

            def poison(r, parts=parts, mine=mine):
                own = {name: value[r] if isinstance(value, list) else value for name, value in mine.items()}
                q, k, v = (x[r].requires_grad_() for x in parts)
                cp_attn.attention(q, k, v, group.contexts[r], **own).sum().backward()

            group.run(poison)
            judge_call(group, torch.float32, 300 + seed)
            judge_call(group, torch.float32, 400 + seed)
    finally:
        torch.use_deterministic_algorithms(before)


@functools.cache
def of_two_ranks():
    """Return inputs and what two ranks answer, in float32."""
    q, k, v, upstream = torch.randn(4, 2, 24, H, 16, generator=torch.Generator().manual_seed(31))
    with Ranks(2, ring_degree=2) as ranks:
        return (q, k, v, upstream), whole_answer(ranks, q, k, v, upstream)


def whole_answer(ranks, q, k, v, upstream):
    """Return output, LSE and gradients, put together."""
    rows = [len(x) for x in torch.arange(q.shape[1]).tensor_split(ranks.world)]
    parts = list(zip(*(cut(x, rows) for x in (q, k, v, upstream)), strict=True))

    def run(r):
        own = [x.clone().requires_grad_() for x in parts[r][:3]]
        out, lse = cp_attn.attention(*own, ranks.contexts[r], return_lse=True, is_causal=True)
        out.backward(parts[r][3])
        return out.detach(), lse.detach(), *(x.grad for x in own)

    return [torch.cat(x, 1) for x in zip(*ranks.run(run), strict=True)]


@every
def test_nothing_depends_on_the_ranks(group):
    """The same whole on any number of them, cut anyhow: the same numbers, but for the order of a few sums."""
    inputs, want = of_two_ranks()
    for got, expected in zip(whole_answer(group, *inputs), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=3e-6)


def grads(function, inputs, upstream):
    """Return the gradients of the inputs, for weights of the outputs; an LSE of -inf has none."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*inputs)[: len(upstream)]
    weights = [u.to(x.dtype).masked_fill(x.isinf(), 0) for x, u in zip(outputs, upstream, strict=True)]
    torch.autograd.backward(outputs, weights)
    return [x.grad for x in inputs]


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("seed", range(4))
def test_gradients_at_random(group, dtype, seed):
    """On every rank, for a loss that weighs every number differently, the LSE's too where it is asked for."""
    lengths, kv_lengths, tensors, more, mine = random_call(100 + seed, group, dtype)
    with_lse = bool(seed % 2)
    generator = torch.Generator().manual_seed(seed)
    (B, s, heads, _), Dv = tensors[0].shape, tensors[2].shape[3]
    shapes = ((B, s, heads, Dv), (B, s, heads))[: 1 + with_lse]
    upstream = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    truth = grads(functools.partial(plain, **more), [x.double() for x in tensors], upstream)
    yardstick = grads(functools.partial(plain, **more, dtype=dtype), tensors, upstream)
    parts = [cut(x, n) for x, n in zip(tensors, (lengths, kv_lengths, kv_lengths), strict=True)]
    weights = [cut(x, lengths) for x in upstream]

    def rank_grads(r):
        own = {name: value[r] if isinstance(value, list) else value for name, value in mine.items()}

        def function(*x):
            found = cp_attn.attention(*x, group.contexts[r], return_lse=with_lse, **own)
            return found if with_lse else (found,)

        return grads(function, [x[r] for x in parts], [x[r] for x in weights])

    for whole, want, plainly in zip(zip(*group.run(rank_grads), strict=True), truth, yardstick, strict=True):
        judge(torch.cat(whole, 1), want, plainly)


@every
def test_a_plain_sum(group):
    """Its gradient comes as one number with strides of 0."""
    x = torch.randn(3, 1, 2 * group.world, H, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    want = torch.autograd.functional.jacobian(lambda *x: plain(*x)[0].sum(), tuple(x))
    parts = [cut(y, [2] * group.world) for y in x]

    def run(r):
        own = [p[r].clone().requires_grad_() for p in parts]
        cp_attn.attention(*own, group.contexts[r]).sum().backward()
        return [y.grad for y in own]

    for mine, whole in zip(zip(*group.run(run), strict=True), want, strict=True):
        torch.testing.assert_close(torch.cat(mine, 1), whole, rtol=1e-12, atol=1e-12)


ROUNDS = [name for name in VARIANTS if VARIANTS[name][1].get("ring_degree", 1) > 1]


@pytest.mark.parametrize("convert_to_fp32", [True, False])
@pytest.mark.parametrize("variant", ROUNDS)
def test_error_does_not_grow_with_the_ranks(variant, convert_to_fp32):
    """bfloat16, D = 64, forward and backward: off from float64 as much as in one piece, on 2 ranks and on 6.

    Kernels differ in that: one rounds its weights to bfloat16 (as FlashAttention does), the others the output alone.
    """
    world, config = VARIANTS[variant]
    q, k, v, upstream = torch.randn(4, 1, 72, H, 64, generator=torch.Generator().manual_seed(777)).to(torch.bfloat16)
    inputs = [x.double() for x in (q, k, v)]
    truth = [plain(q, k, v)[0], *grads(plain, inputs, [upstream.double()])]

    def run(world, config):
        lengths = [72 // world] * world

        def attend(r):
            own = [cut(x, lengths)[r].clone().requires_grad_() for x in (q, k, v)]
            out = cp_attn.attention(*own, ranks.contexts[r])
            out.backward(cut(upstream, lengths)[r])
            return out.detach(), *(x.grad for x in own)

        with Ranks(world, convert_to_fp32=convert_to_fp32, **config) as ranks:
            return [torch.cat(x, 1) for x in zip(*ranks.run(attend), strict=True)]

    for got, alone, exact in zip(run(world, config), run(2, {"ulysses_degree": 2}), truth, strict=True):
        rounded = exact.to(torch.bfloat16)
        error, usual, least = ((x.double() - exact).norm() / exact.norm() for x in (got, alone, rounded))
        assert usual <= 2 * least
        assert error <= (1.1 if convert_to_fp32 else 4) * usual


# --- keys that every rank has whole ---


@every
@pytest.mark.parametrize("mask", [None, (2, 1, 1, 5), (1, H, True, 5)])
def test_replicated_keys(group, mask):
    """Each query meets them once, whatever the lengths, with masks of every kind, and gradients."""
    generator = torch.Generator().manual_seed(22)
    for lengths in ([2] * group.world, list(range(group.world)), [0] * (group.world - 1) + [3]):
        s = sum(lengths)
        q, k, v = (torch.randn(2, n, H, 4, generator=generator, dtype=torch.float64) for n in (s, 5, 5))
        bits = mask and torch.rand([s if n is True else n for n in mask], generator=generator) > 0.4
        mine = list(cut(bits, lengths, 2)) if mask and mask[2] is True else [bits] * group.world
        upstream = [torch.randn(q.shape, generator=generator, dtype=torch.float64)]
        call = functools.partial(_replicated, group, cut(q, lengths), k, v, mine, cut(upstream[0], lengths))
        out, dq, dk, dv = zip(*group.run(call), strict=True)
        want = [plain(q, k, v, bits)[0], *grads(functools.partial(plain, mask=bits), (q, k, v), upstream)]
        for got, whole in zip((torch.cat(out, 1), torch.cat(dq, 1), sum(dk), sum(dv)), want, strict=True):
            torch.testing.assert_close(got, whole, rtol=1e-11, atol=1e-11)


@every
def test_what_a_length_may_suggest(group):
    """Whole keys as many as a rank's own rows, or as all rows: the arguments say what they are, not their number."""
    generator = torch.Generator().manual_seed(23)
    for lengths in lengths_of(group):
        s = sum(lengths)
        for t, is_causal in itertools.product({*lengths, s} - {0}, (False, True)):
            q, k, v = (torch.randn(2, n, H, 3, generator=generator, dtype=torch.float64) for n in (s, t, t))
            bits = torch.rand(2, t, generator=generator) > 0.4
            whole = ([k] * group.world, [v] * group.world)
            found = group.attention(cut(q, lengths), *whole, kv="replicated", attn_mask=bits, is_causal=is_causal)
            want, _ = plain(q, k, v, bits[:, None, None], is_causal)
            torch.testing.assert_close(torch.cat(found, 1), want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("variant", ["ring2", "ulysses3", "unified2x2", "unified_anything3x2"])
def test_replicated_keys_do_not_move(variant):
    """What ranks move lies in windows, and here nobody needs any; a call whose keys are split then does."""
    world, config = VARIANTS[variant]
    x = torch.randn(2, 3, H, 8, generator=torch.Generator().manual_seed(24))
    with Ranks(world, **config) as ranks:

        def run(r):
            q, k, v = (x.clone().requires_grad_() for _ in range(3))
            cp_attn.attention(q, k, v, ranks.contexts[r], kv="replicated").sum().backward()
            return ranks.contexts[r]._memory()[1]

        assert ranks.run(run) == [0] * world
        ranks.attention(*[[x] * world] * 3)
        assert all(context._memory()[1] > 0 for context in ranks.contexts)


def _replicated(group, q, k, v, masks, upstream, r):
    def function(*x):
        return (cp_attn.attention(*x, group.contexts[r], kv="replicated", attn_mask=masks[r]),)

    return function(q[r], k, v)[0], *grads(function, (q[r], k, v), [upstream[r]])


# --- what cannot be right is refused, on every rank ---


def refused(group, call, kind, *words, odd=None):
    for rank, caught in enumerate(group.errors(call)):
        assert type(caught) is kind, f"rank {rank}: {caught!r}"
        assert all(word in str(caught) for word in words), f"rank {rank}: {caught}"
        assert odd in (None, rank) or f"rank {odd}" in str(caught), f"rank {rank}: {caught}"


@strict
def test_lengths_that_differ(group):
    """Without the flag for them; the sentence has the lengths and the flag."""
    kinds = {(False, True): "ulysses_anything", (True, False): "ring_anything", (True, True): "unified_anything"}
    flag = kinds[group.config.ring_degree > 1, group.config.ulysses_degree > 1]
    last = group.world - 1
    for long, short in ((3, 2), (1, 0), (8, 9)):
        x = [torch.ones(1, short if r == last else long, H, 2) for r in range(group.world)]
        refused(
            group,
            lambda r, x=x: cp_attn.attention(*[x[r]] * 3, group.contexts[r]),
            ValueError,
            flag,
            f"{long}",
            f"{short}",
        )


# what one rank has that the others have not: (its tensors, its keywords, the error)
ODD = {
    "head dim": (dict(D=3), {}, ValueError),
    "heads": (dict(H=2 * H), {}, ValueError),
    "batch": (dict(B=2), {}, ValueError),
    "dtype": (dict(dtype=torch.float64), {}, TypeError),
    "dtype of the same size": (dict(dtype=torch.bfloat16), {}, TypeError),
    "mask": ({}, dict(attn_mask=torch.ones(1, 2, dtype=torch.bool)), ValueError),
    "mask that fits nothing": ({}, dict(attn_mask=torch.ones(1, 97, dtype=torch.bool)), ValueError),
    "causal": ({}, dict(is_causal=True), ValueError),
    "scale": ({}, dict(scale=0.3), ValueError),
    "dropout": ({}, dict(dropout_p=0.1), ValueError),
}


@every
@pytest.mark.parametrize("what", ODD)
def test_one_rank_differs(group, what):
    """The same kind of error on all ranks, with the number of the one that differs."""
    shape, keywords, kind = ODD[what]

    def x(B=1, s=2, H=H, D=4, dtype=torch.float16):
        return torch.ones(B, s, H, D, dtype=dtype)

    for odd in (group.world - 1, 1):

        def call(r, odd=odd):
            return cp_attn.attention(
                *[x(**shape if r == odd else {})] * 3, group.contexts[r], **keywords if r == odd else {}
            )

        refused(group, call, kind, odd=odd)


@every
def test_heads_that_do_not_fit(group):
    """Without enable_gqa they must be equal; with it, divide; and those of k and v must be the same."""
    for heads, kv_heads, v_heads, enable in ((12, 6, 6, False), (12, 5, 5, True), (12, 6, 3, True), (6, 12, 12, True)):
        q, k, v = (torch.ones(1, 2, n, 4) for n in (heads, kv_heads, v_heads))

        def call(r, q=q, k=k, v=v, enable=enable):
            return cp_attn.attention(q, k, v, group.contexts[r], enable_gqa=enable)

        refused(group, call, ValueError, f"{v_heads}")


# what a rank may be at, by the name that the others hear
OPERATIONS = {
    "attention(": lambda context, x: cp_attn.attention(x, x, x, context),
    "attention backward(": lambda context, x: x.loss.backward(),
    "gather(": lambda context, x: context.gather(x, 1),
    "shard(": lambda context, x: context.shard(x, 1),
    "agree(": lambda context, x: context.agree(),
    "reduce_scatter(": lambda context, x: context._reduce_scatter(x, 1, 2),
}


@every
def test_a_rank_that_is_a_call_ahead(group):
    """One rank makes another call than the others: an error on all ranks that names both, and no number."""
    for mine, theirs in itertools.permutations(OPERATIONS, 2):
        odd = group.world - 1

        def call(r, mine=mine, theirs=theirs, odd=odd):
            x = torch.ones(1, 2 * group.world, H, 2, requires_grad=True)
            x.loss = cp_attn.attention(x, x, x, group.contexts[r]).sum()
            return OPERATIONS[mine if r == odd else theirs](group.contexts[r], x)

        refused(group, call, ValueError, mine, theirs, odd=odd)


@pytest.mark.parametrize("variant", ["ring2", "ring3", "ulysses2"])
def test_more_than_any_buffer_holds(variant):
    """64 MiB of keys and of values on every rank, which all send at the same time; in a ring of two, gradients too."""
    world, config = VARIANTS[variant]
    has_grad = variant == "ring2"
    generator = torch.Generator().manual_seed(41)
    k, v = torch.randn(2, 1, 2048, 64, 128, generator=generator)
    q, upstream = torch.randn(2, world, 1, 2, 64, 128, generator=generator)
    keys, values = ([x, x.flip(3), x.flip(2)][:world] for x in (k, v))
    with Ranks(world, **config) as ranks:

        def run(r):
            own = [x[r].detach().requires_grad_(has_grad) for x in (q, keys, values)]
            out = cp_attn.attention(*own, ranks.contexts[r])
            if has_grad:
                out.backward(upstream[r])
                # Each row's weights are 1 together.
                summed = ranks.contexts[r].gather(own[2].grad.sum(1, keepdim=True), 1).sum(1)
                torch.testing.assert_close(summed, upstream.sum((0, 2)), rtol=1e-4, atol=1e-4)
            return out.detach()

        out = torch.cat(ranks.run(run), 1)
    want, _ = plain(torch.cat(list(q), 1), torch.cat(keys, 1), torch.cat(values, 1), dtype=torch.float32)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["ring3", "ulysses3", "unified2x2", "ring_anything4", "ulysses_anything3"])
def test_a_rank_that_is_late(variant):
    """An exception that names the rank that is missing; the context then says why it is of no use, and closes."""
    world, config = VARIANTS[variant]
    x = torch.ones(1, 2, H, 4)
    with Ranks(world, **config, timeout=1.0) as ranks:

        def call(r):
            return None if r == world - 1 else cp_attn.attention(x, x, x, ranks.contexts[r])

        caught = ranks.errors(call)
        assert caught.pop() is None
        assert all(isinstance(e, cp_attn.CommTimeout) and isinstance(e, TimeoutError) for e in caught), caught
        assert all(f"rank {world - 1} did not come to attention, call 1" in str(e) for e in caught), caught
        again = ranks.errors(call)[:-1]
        assert all(isinstance(e, cp_attn.CommError) and f"rank {world - 1}" in str(e) for e in again), again


@pytest.mark.parametrize("degree", [0, -1, "2", True, 1.5, None, [2]])
@pytest.mark.parametrize("name", ["ring_degree", "ulysses_degree"])
def test_degrees_that_are_none(name, degree):
    """Refused when the config is made, before anybody meets anybody."""
    with pytest.raises((ValueError, TypeError)) as caught:
        cp_attn.ContextParallelConfig(**{name: degree})
    assert "degree" in str(caught.value)
