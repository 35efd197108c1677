"""Tables in Markdown, of the runs that benchmarks.table keeps as JSON."""

import os

from . import where

GB, MIB = 1e9, 2**20
BEGIN, END = "<!-- benchmarks.table: begin -->", "<!-- benchmarks.table: end -->"


def markdown(columns, rows):
    """A table: `columns` are {heading: function of a row}; numbers go to the right."""
    cells = [[str(cell(row)) for cell in columns.values()] for row in rows]
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "|".join("---" if heading in TEXTS else "---:" for heading in columns) + "|"
    yield from ("| " + " | ".join(row) + " |" for row in cells)


TEXTS = {"CP Backend", "Shape (HxW)", "Library", "Note"}


def number(name, form, scale=1.0, absent=""):
    return lambda row: absent if row[name] is None else format(row[name] / scale, form)


# The documentation's five, which has `failed` for what could not run; then ours.
COLUMNS = {
    "CP Backend": lambda row: row["backend"],
    "Time / Iter (ms)": number("ms", ",.2f", absent="failed"),
    "Steps / Sec": number("steps_a_second", ".2f", absent="failed"),
    "Peak Memory (GB)": number("peak_bytes", ".3f", GB, "failed"),
    "Shape (HxW)": lambda row: row["picture"],
    "Library": lambda row: row["library"],
    "Speed-up": number("speed_up", ".2f"),
    "Efficiency": number("efficiency", ".2f"),
}
PEER_COLUMNS = {"Time / cp_attn's": number("times_ours", ".2f")}
NOTES = {"Note": lambda row: row["note"] or ""}


def group_of(row):
    """What rows of one table have in common."""
    names = ("model", "heads", "model_heads", "dim", "layers", "model_layers", "dtype", "direction", "ranks", "device")
    return tuple(row[name] for name in names)


def title_of(row):
    """What was run, and how far it is scaled down."""
    return (
        f"**{row['model']}, {row['ranks']} ranks on {row['device']}**: {row['direction']}, {row['dtype']}, "
        f"{row['heads']} of {row['model_heads']} heads, head dim {row['dim']}, "
        f"attention of {row['layers']} of {row['model_layers']} layers a step"
    )


def length_of(row):
    """The picture with its tokens; a bare number of tokens is its own picture."""
    tokens = f"{row['tokens']:,} tokens"
    return tokens if row["picture"].endswith("tokens") else f"{row['picture']} is {tokens}"


def times_tables(rows):
    for group in dict.fromkeys(map(group_of, rows)):
        mine = [row for row in rows if group_of(row) == group]
        columns = dict(COLUMNS)
        if any(row["library"] != "cp_attn" for row in mine):
            columns |= PEER_COLUMNS
        if any(row["note"] for row in mine):
            columns |= NOTES
        yield f"{title_of(mine[0])}; {', '.join(dict.fromkeys(map(length_of, mine)))}."
        yield ""
        yield from markdown(columns, mine)
        yield ""


WHERE_COLUMNS = {
    "CP Backend": lambda row: row["backend"],
    "Rank": lambda row: row["rank"],
    "Step (ms)": lambda row: f"{row['ms']:,.2f}",
    **{part: lambda row, part=part: f"{row['parts'][part]:.2f}" for part in where.PARTS},
    "Launches": lambda row: row["launches"],
    "From peers (MiB)": lambda row: f"{row['peer_bytes'] / MIB:.1f}",
}


def legend_of(entries):
    """What the columns of `where_tables` mean."""
    yield "Where the time goes, in milliseconds a step of each rank:"
    yield ""
    yield from (f"* *{part}*: {meaning}" for part, meaning in where.PARTS.items())
    yield "* *Launches*, *From peers*: the schedule's own; steps that compute or move, and bytes of other ranks"
    if any(entry["device"] == "cuda" for entry in entries):
        yield "* on a GPU times are the host's, which enqueues steps and does not wait for them"
    yield ""


def where_tables(entries):
    def kind_of(entry):
        return group_of(entry), entry["picture"], entry["slow"]

    for kind in dict.fromkeys(map(kind_of, entries)):
        mine = [entry for entry in entries if kind_of(entry) == kind]
        slow = f"; {mine[0]['slow']} before each call" if mine[0]["slow"] else ""
        yield f"{title_of(mine[0])}; {length_of(mine[0])}{slow}."
        yield ""
        ranks = [{"backend": entry["backend"], **rank} for entry in mine for rank in entry["by_rank"]]
        yield from markdown(WHERE_COLUMNS, ranks)
        yield ""


def lines_of(runs):
    """Everything that the runs say."""
    for run in runs:
        for name, value in run["about"].items():
            yield f"* {name}: {f'`{value}`' if name == 'command' else value}"
        yield ""
        yield from times_tables(run["rows"])
        if run["where"]:
            yield from legend_of(run["where"])
            yield from where_tables(run["where"])


def fill(path, runs, picture=None):
    """Put a picture and the tables between the two marks of a page; one that is not there is made of them alone."""
    text = path.read_text() if path.exists() else f"{BEGIN}\n{END}\n"
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path} has no lines {BEGIN} and {END}, between which the tables would go")
    shown = f"![time and memory]({os.path.relpath(picture, path.parent)})\n\n" if picture else ""
    tables = "\n".join(lines_of(runs)).rstrip()
    path.write_text(f"{head}{begin}\n{shown}{tables}\n{end}{tail}")
