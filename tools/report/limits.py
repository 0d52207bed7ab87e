"""Pictures of what bounds a case: the machine's peak and bandwidth, and memory."""
import collections
import math

import plots
from results import parse_case, title


def threads_text(threads):
    return f"{threads} thread{'s' * (threads != 1)}"


def intensity(row):
    """Useful operations for each byte of Q, K, V and O."""
    return row.gflops / row.gbps


def peak(groups):
    """The units' peak for these groups' threads, as measured around them; GFLOP/s."""
    peaks = [r.get("peak_gflops") or 100 * r.gflops / r.pct_peak for g in groups for r in g.rows if r.get("peak_gflops") or r.get("pct_peak")]
    return max(peaks, default=None)


def roofline(groups, read_gbps):
    """attune (filled) and the best peer (hollow) of each case under the two roofs; empty where the file has no roofs."""
    roof = peak(groups)
    groups = [g for g in groups if g.attune and g.attune.gflops and g.attune.gbps]
    if not (roof and read_gbps and groups):
        return ""
    figure, axes = plots.plt.subplots(figsize=(5.6, 3.6), layout="constrained")
    at = [intensity(g.attune) for g in groups]
    left, right = min(*at, roof / read_gbps) / 2, max(*at, roof / read_gbps) * 2
    axes.plot([left, roof / read_gbps, right], [left * read_gbps, roof, roof], color=plots.INK, linewidth=1.2,
              label=f"peak {roof:.0f} GFLOP/s, read loop {read_gbps:.1f} GB/s")
    peers = [g.best_peer for g in groups if g.best_peer and g.best_peer.gflops and g.best_peer.gbps]
    axes.plot([intensity(p) for p in peers], [p.gflops for p in peers], "o", color=plots.PEERS[0], fillstyle="none", markersize=4.5, label="best peer")
    axes.plot(at, [g.attune.gflops for g in groups], "o", color=plots.ATTUNE, markersize=4, label="attune")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(min(roof / 30, axes.get_ylim()[0]), roof * 1.5)  # a decade at least, whose labels are short
    axes.yaxis.set_minor_formatter("")
    axes.set_xlabel("useful operations for each byte of Q, K, V, O")
    axes.set_ylabel("GFLOP/s")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=3, fontsize=8, frameon=False)
    return plots.to_svg(figure)


def score_bytes(case):
    """What the matrix of scores takes, in f32, that an unfused form writes; None for a case without these sizes."""
    sizes, _ = parse_case(case)
    if not {"h", "n"} <= set(sizes):
        return None
    return 4 * sizes.get("b", 1) * sizes["h"] * sizes["n"] * sizes.get("m", sizes["n"])


def contestant(group, row):
    """A name that is the same for all cases of a file."""
    return (row.get("strategy") or row.kernel) if group.compares_kernels and row.is_attune else title(row.impl)


def extra_bytes(row):
    """attune: its workspace, known before a run; peers: by how much the process grew, if it did."""
    return row.get("workspace_bytes") if row.is_attune else row.get("rss_growth_bytes")


def byte_axis(axis):
    units = {1 << 10: "1 KiB", 1 << 15: "32 KiB", 1 << 20: "1 MiB", 1 << 25: "32 MiB", 1 << 30: "1 GiB", 1 << 35: "32 GiB"}
    low, high = axis.get_view_interval()
    shown = {at: text for at, text in units.items() if low <= at <= high}
    axis.set_ticks(list(shown), list(shown.values()))
    axis.set_ticks([], minor=True)


def memory(groups):
    """A line a case: the workspace, the best peer's growth, and the matrix of scores."""
    groups = [g for g in groups if g.attune and g.attune.get("workspace_bytes") is not None and score_bytes(g.case)]
    if not groups:
        return ""
    figure, axes = plots.plt.subplots(figsize=(5.8, 0.22 * len(groups) + 1), layout="constrained")
    at = range(len(groups))
    least = 1024  # what takes less than a page is drawn at the edge
    axes.plot([max(score_bytes(g.case), least) for g in groups], at, "|", color=plots.INK, markersize=9, markeredgewidth=2, label="unfused scores, n²")
    peers = [(i, extra_bytes(g.best_peer)) for i, g in enumerate(groups) if g.best_peer and extra_bytes(g.best_peer) is not None]
    if peers:
        axes.plot([max(b, least) for _, b in peers], [i for i, _ in peers], "o", color=plots.PEERS[1], fillstyle="none", markersize=5, label="best peer's growth")
    axes.plot([max(g.attune.workspace_bytes, least) for g in groups], at, "o", color=plots.ATTUNE, markersize=5, label="attune's workspace")
    axes.set_xscale("log", base=2)
    byte_axis(axes.xaxis)
    axes.set_yticks(at, [g.short_case for g in groups], fontsize=8)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.grid(axis="x", linewidth=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    return plots.to_svg(figure)


def length_series(results):
    """Cases that differ only in n: {(threads, case with n as a letter): [(n, group)]}, three lengths at least."""
    found = collections.defaultdict(list)
    for group in results.groups:
        sizes, _ = parse_case(group.case)
        if "n" in sizes and "m" not in sizes and group.rows:
            found[group.threads, ":".join("n" if p == f"n{sizes['n']}" else p for p in group.case.split(":"))].append((sizes["n"], group))
    return {key: sorted(points, key=lambda p: p[0]) for key, points in found.items() if len({n for n, _ in points}) >= 3}


def over_length(points, palette):
    """Time over n and memory over n, a line a contestant; beside memory the n² of the scores."""
    lengths = [n for n, _ in points]
    lines = collections.defaultdict(lambda: {"s": [math.nan] * len(points), "bytes": [math.nan] * len(points)})
    for i, (_, group) in enumerate(points):
        for row in group.rows:
            line = lines[contestant(group, row)]
            line["s"][i] = row.median_s * 1e3
            line["impl"] = row.impl
            line["bytes"][i] = extra_bytes(row) or math.nan
    pictures = []
    order = sorted(lines, key=lambda name: name != "attune")
    for key, label in (("s", "ms"), ("bytes", "memory beside Q, K, V and O")):
        figure, axes = plots.plt.subplots(figsize=(5.2, 3.6), layout="constrained")
        for i, name in enumerate(order):
            line, own = lines[name], name == "attune"
            if all(map(math.isnan, line[key])):
                continue
            # A gap is no reason to break a line.
            known = [(n, v) for n, v in zip(lengths, line[key]) if not math.isnan(v)]
            colour = palette[line["impl"]] if line["impl"] in palette and line["impl"] != "attune" or own else plots.PEERS[i % len(plots.PEERS)]
            axes.plot(*zip(*known), marker="o", markersize=3.5, color=colour, label=name, linewidth=2.2 if own else 1, zorder=3 if own else 2)
        if key == "bytes":
            axes.plot(lengths, [score_bytes(g.case) for _, g in points], color=plots.INK, linestyle=":", label="scores in f32, n²")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2 if key == "bytes" else 10)
        if key == "bytes":
            byte_axis(axes.yaxis)
        # Lengths that would print on top of each other (1000, 1024) have one label.
        ticks = [n for i, n in enumerate(lengths) if i + 1 == len(lengths) or lengths[i + 1] > 1.2 * n]
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.minorticks_off()
        axes.set_xlabel("n")
        axes.set_ylabel(label)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7, frameon=False)
        pictures.append(plots.to_svg(figure))
    return pictures
