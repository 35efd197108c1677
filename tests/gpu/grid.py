"""What the grid is made of: layouts of ranks, and kinds of calls."""

# heads, key/value heads, causal, with a mask
KINDS = {
    "dense": (12, 12, False, False),
    "causal": (12, 12, True, False),
    "masked": (12, 12, False, True),
    "grouped": (24, 12, False, False),
    "all": (24, 12, True, True),
}


def kinds_of(backend):
    """Return the kinds of calls that a backend takes: packages have no mask, and sage no grouped heads."""
    is_native, is_sage = "native" in backend, "sage" in backend
    return {
        name: kind for name, kind in KINDS.items() if (is_native or not kind[3]) and (not is_sage or kind[0] == kind[1])
    }


def variants(world):
    """Return {name: fields of the config} for so many ranks."""
    found = {"ring": {"ring_degree": world}, "ring_anything": {"ring_degree": world, "ring_anything": True}}
    found["alltoall"] = {"ring_degree": world, "rotate_method": "alltoall"}
    if 12 % world == 0:
        found["ulysses"] = {"ulysses_degree": world}
    found["ulysses_anything"] = {"ulysses_degree": world, "ulysses_anything": True}
    for ring in range(2, world):
        if world % ring == 0:
            degrees = {"ring_degree": ring, "ulysses_degree": world // ring}
            found[f"unified{ring}x{world // ring}"] = degrees
            found[f"unified_anything{ring}x{world // ring}"] = degrees | {"unified_anything": True}
    return found
