"""The lengths of one forward: of the streams that the plan has cut, and of the inputs that it left whole.

A guard: keys of which some are split and some are whole on every rank would count the whole ones once per rank, so a
length of keys that only adds up from both kinds is refused. Here are comparisons only, which the compiler of torch can
make of lengths that it keeps open.
"""


class Streams:
    """Each stream is (name, its rows, those that this rank holds); of equal ones the first is kept."""

    def __init__(self):
        self.split, self.whole = (), ()

    def add_split(self, name, size, local):
        """Note a stream of `size` rows of which this rank holds `local`."""
        # What is known already must not be written: checkpoints that are compiled admit no write.
        if not _has(self.split, size, local):
            self.split = (*self.split, (name, size, local))

    def add_whole(self, name, size):
        """Note an input of `size` rows that every rank holds whole."""
        if not _has(self.whole, size, size):
            self.whole = (*self.whole, (name, size, size))

    def sizes(self):
        """Return the rows of the split streams, and those of the whole inputs."""
        return [size for _, size, _ in self.split], [size for _, size, _ in self.whole]

    def size_of(self, rows):
        """Return the whole length of what this rank holds `rows` of, split streams or joined ones; None if unsure."""
        found = None
        for local, chosen in _sums(self.split):
            if local == rows:
                size = sum([stream[1] for stream in chosen])
                if found is not None and found != size:
                    return None
                found = size
        return found

    def mixed(self, keys):
        """Return a sentence if `keys` local keys are split and whole ones together, else None."""
        if not self.whole:
            return None
        for _, _, rows in (*self.split, *self.whole):
            if rows == keys:
                return None
        split, whole = _sums(self.split), _sums(self.whole)
        for rows, _ in (*split, *whole):
            if rows == keys:
                return None
        for rows, cut in split:
            for more, full in whole:
                if rows + more == keys:
                    return _sentence(keys, cut, full)
        return None

    def unplaced(self, keys, masked):
        """Return a sentence if a mask over `masked` keys belongs to no `keys` local keys that are known, else None.

        It is right where it covers the rank's own keys, or all of one stream. Over several streams, one behind the
        other, it is not: their keys lie rank by rank.
        """
        if not self.split or masked == keys or masked == 1 or _has(self.split, masked, keys):
            return None
        return (
            f"attn_mask covers {masked} keys: neither the rank's own {keys} nor all of one stream that the plan has "
            f"split. Keys of joined streams lie rank by rank, so pass the mask of the rank's own"
        )


def _has(streams, size, local):
    for stream in streams:
        if stream[1] == size and stream[2] == local:
            return True
    return False


def _sums(streams):
    """Return [(local rows, streams that have them together)] for every choice of one to four streams."""
    sums = [(0, ())]
    for stream in streams:
        sums += [(rows + stream[2], (*chosen, stream)) for rows, chosen in sums if len(chosen) < 4]
    return sums[1:]


def _sentence(keys, split, whole):
    cut = " and ".join(f"{name!r} ({local} of {size} rows)" for name, size, local in split)
    full = " and ".join(f"{name!r} ({size} rows)" for name, size, _ in whole)
    return (
        f"an attention over {keys} keys joins {cut}, split by the plan, with {full}, whole on every rank: the whole "
        "keys would count once per rank. A plan must split all streams of a joint attention"
    )
