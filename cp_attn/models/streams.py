"""A guard: keys of which some are split and some are whole on every rank would count the whole ones once per rank.

Known are the lengths of the streams that the plan has cut in this forward, and of the inputs that it left whole. A
length of keys that only adds up from both kinds is refused.
"""


class Streams:
    """The lengths of one forward."""

    def __init__(self):
        self.split, self.whole = set(), set()
        self._seen = {}

    def add_split(self, name, size, local):
        """Note a stream of `size` rows of which this rank holds `local`."""
        self._note(self.split, (name, size, local))

    def add_whole(self, name, size):
        """Note an input of `size` rows that every rank holds whole."""
        self._note(self.whole, (name, size, size))

    def _note(self, streams, stream):
        if stream not in streams:
            streams.add(stream)
            self._seen.clear()

    def mixed(self, keys):
        """Return a sentence if `keys` local keys are split and whole ones together, else None."""
        if keys not in self._seen:
            split, whole = _sums(self.split), _sums(self.whole)
            pairs = () if keys in split or keys in whole else ((split[a], whole.get(keys - a)) for a in split)
            self._seen[keys] = next((_sentence(keys, a, b) for a, b in pairs if b), None)
        return self._seen[keys]


def _sums(streams):
    """Return {local rows: streams that have them together} for every choice of at least one stream."""
    sums = {0: ()}
    for stream in sorted(streams):
        sums.update({rows + stream[2]: (*chosen, stream) for rows, chosen in sums.items() if len(chosen) < 4})
    sums.pop(0)
    return sums


def _sentence(keys, split, whole):
    cut = " and ".join(f"{name!r} ({local} of {size} rows)" for name, size, local in split)
    full = " and ".join(f"{name!r} ({size} rows)" for name, size, _ in whole)
    return (
        f"an attention over {keys} keys joins {cut}, split by the plan, with {full}, whole on every rank: the whole "
        "keys would count once per rank. A plan must split all streams of a joint attention"
    )
