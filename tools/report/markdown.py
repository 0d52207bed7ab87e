"""Results as tables of Markdown, for docs/performance.md: a table for each type and number of threads."""
from results import geometric_mean, title

BEGIN, END = "<!-- attune report: begin -->", "<!-- attune report: end -->"


def row(cells):
    return "| " + " | ".join(cells) + " |"


def number(value, pattern="{:.1f}"):
    return "–" if value is None else pattern.format(value)


def render(files):
    """The tables of all files, one after the other."""
    return "\n".join(render_file(results) for results in files)


def about(results):
    """The file's date, machine and versions; the peaks of the types that it has."""
    m = results.machine
    versions = "".join(f", {name} {version}" for name, version in results.versions.items())
    peaks = "".join(f"{dtype} peak {number(m.get('peak_gflops_' + dtype), '{:.0f}')} GFLOP/s on all cores, "
                    for dtype in results.dtypes if m.get("peak_gflops_" + dtype))
    return [f"{results.date[:10] or 'No date'}: {m['cpu']}, {m['cores']} cores, {m['isa']}; attune {results.version}{versions}.",
            f"{peaks}reading {number(m.get('read_gbps'))} GB/s.", ""]


def table(groups, impls):
    header = ["case", "attune", "share", "attune is", "itself", *map(title, impls)]
    lines = [row(header), row(["---"] + ["---:"] * (len(header) - 1))]
    for g in groups:
        cells = {r.impl: r for r in g.rows}
        unit = " GB/s" if g.rows and g.rows[0].reads_memory else ""
        best = g.best_peer.impl if g.best_peer else None

        def cell(impl):
            r = cells.get(impl)
            if not r:
                return "–"
            text = number(r.rate) + ("" if r.ok else " (wrong)")
            return f"**{text}**" if impl == best else text

        lines.append(row([f"`{g.case.partition(':')[2]}`", number(g.attune.rate if g.attune else None) + unit,
                          number(g.attune.share if g.attune else None, "{:.0f} %"), number(g.lead, "{:.2f}×"),
                          number(g.self_ratio, "{:.3f}"), *map(cell, impls)]))
    if leads := [g.lead for g in groups if g.lead]:
        lines += ["", f"attune over the best peer: {geometric_mean(leads):.2f}× in the geometric mean of {len(leads)} cases, "
                      f"{min(leads):.2f}× at least."]
    return lines + [""]


def render_file(results):
    lines = about(results)
    for dtype in results.dtypes:
        for threads in results.thread_counts:
            groups = [g for g in results.groups if (g.dtype, g.threads) == (dtype, threads) and not g.compares_kernels]
            if groups:
                impls = [i for i in results.impls if any(r.impl == i for g in groups for r in g.rows)]
                lines += [f"### {dtype}, {threads} thread{'s' * (threads != 1)}", "", *table(groups, impls)]
    cannot = {}
    for g in results.groups:
        for r in g.cannot:
            cannot.setdefault((title(r.impl), r.get("why_not", "")), set()).add(g.short_case)
    if cannot:
        lines += ["Not measured (–):", ""]
        lines += [f"- {name}, {len(cases)} case{'s' * (len(cases) != 1)}: {why}" for (name, why), cases in sorted(cannot.items())]
        lines.append("")
    return "\n".join(lines)


def into(text, table):
    """`text` with what stands between the two marks replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        return None
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table}{END}{rest.split(END)[1]}"
