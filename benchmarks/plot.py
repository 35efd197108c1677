"""Time and memory against tokens and against ranks, of the runs that benchmarks.table keeps as JSON."""

from itertools import cycle

COLORS = ("black", "tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:red")
STYLES = {"cp_attn": "-", "diffusers": "--", "torch": ":", "torch.distributed": "-."}


def alike(row):
    """What may not differ along a line."""
    return tuple(row[name] for name in ("library", "backend", "heads", "dim", "layers", "dtype", "direction"))


def most_common(rows, name):
    """The number of ranks (tokens) that was run with the most different tokens (ranks); the largest of such."""
    values = {row[name] for row in rows}
    other = {"tokens": "ranks", "ranks": "tokens"}[name]
    return max(values, key=lambda value: (len({row[other] for row in rows if row[name] == value}), value))


def lines_of(rows, along, fixed, value):
    """{what is alike: its rows where `fixed` has `value`, in order}."""
    lines = {}
    for row in rows:
        if row[fixed] == value:
            lines.setdefault(alike(row), []).append(row)
    return {key: sorted(line, key=lambda row: row[along]) for key, line in lines.items()}


def draw(panel, rows, along, fixed, what, scale, colors):
    value = most_common(rows, fixed)
    for key, line in lines_of(rows, along, fixed, value).items():
        library, backend, heads, *_ = key
        points = [(row[along], row[what] / scale) for row in line]
        color = colors[backend]
        label = f"{library} {backend}, {heads} heads"
        panel.plot(*zip(*points, strict=True), STYLES[library], color=color, marker="o", markersize=3, label=label)
    panel.set_title(f"{value:,} {fixed}", fontsize="medium")
    panel.set_xlabel(along)
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)


def plot(path, runs):
    """A PNG of four panels: left against tokens, right against ranks; above time, below memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for run in runs for row in run["rows"] if row["ms"] is not None]
    if not rows:
        raise SystemExit("no row ran, so there is nothing to plot")
    colors = dict(zip(dict.fromkeys(row["backend"] for row in rows), cycle(COLORS), strict=False))
    figure, panels = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for column, (along, fixed) in enumerate((("tokens", "ranks"), ("ranks", "tokens"))):
        for line, (what, scale) in enumerate((("ms", 1.0), ("peak_bytes", 1e9))):
            draw(panels[line, column], rows, along, fixed, what, scale, colors)
    for ranks in (panels[0, 1], panels[1, 1]):
        ranks.set_xticks(sorted({row["ranks"] for row in rows}))
    panels[0, 0].set_ylabel("ms a step")
    panels[1, 0].set_ylabel("peak memory of a rank, GB")
    handles = {line.get_label(): line for panel in panels.flat for line in panel.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize="small")
    figure.suptitle(f"{runs[0]['about']['machine']}, {runs[0]['about']['date'][:10]}", fontsize="medium")
    figure.savefig(path, dpi=120)
    plt.close(figure)
