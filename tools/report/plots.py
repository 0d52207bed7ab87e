"""Pictures as SVG text, to be put into a page as they are."""
import io
import re

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

from results import title  # noqa: E402

ATTUNE = "#ea580c"
PEERS = ["#64748b", "#0891b2", "#65a30d", "#a855f7", "#ca8a04", "#db2777", "#94a3b8", "#3b82f6"]  # seen on white and on black
INK = "#444444"  # stands for the page's colour of text, light or dark

matplotlib.rcParams.update({
    "svg.fonttype": "none",  # text stays text: smaller, and can be searched
    "svg.hashsalt": "attune",  # the same picture has the same bytes
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
})


def to_svg(figure):
    out = io.StringIO()
    figure.savefig(out, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    plt.close(figure)
    text = out.getvalue()
    text = text[text.index("<svg"):]
    # Identifiers are unique within a page only if each picture has its own.
    to_svg.count += 1
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>f{to_svg.count}-", text)
    text = text.replace(INK, "currentColor")
    return re.sub(r'<svg ', '<svg role="img" ', text, count=1)


to_svg.count = 0


def colours(impls):
    return {impl: PEERS[i % len(PEERS)] for i, impl in enumerate(impls)} | {"attune": ATTUNE}


def share_limit(rows):
    return max([100.0] + [r.share * 1.05 for r in rows])


def bars_of_case(group, palette):
    """Bars of each contestant, on an axis of the share of the machine's peak."""
    rows = group.rows
    figure, axes = plt.subplots(figsize=(4.8, 0.24 * len(rows) + 0.9), layout="constrained")
    for i, row in enumerate(rows):
        axes.barh(i, row.share, color=palette.get(row.impl, INK), height=0.72, alpha=1 if row.ok else 0.3,
                  hatch=None if row.ok else "///")
        axes.text(row.share + 1, i, f"{row.rate:.4g}" + ("" if row.ok else " wrong"), va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [group.label(r) for r in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, share_limit(rows) * 1.12)
    axes.axvline(100, color=INK, linewidth=0.6, linestyle=":")
    what = "of the read loop" if rows[0].reads_memory else "of the FMA peak"
    axes.set_xlabel(f"% {what}, {group.threads} thread{'s' * (group.threads != 1)}; figures: {rows[0].unit}", fontsize=8)
    return to_svg(figure)


def overview(groups):
    """attune as bars, the best peer as a line across each, over all cases of one number of threads."""
    groups = [g for g in groups if g.attune]
    figure, axes = plt.subplots(figsize=(5.8, 0.24 * len(groups) + 1), layout="constrained")
    for i, group in enumerate(groups):
        axes.barh(i, group.attune.share, color=ATTUNE, height=0.7, label="attune" if i == 0 else None)
        if group.best_peer:
            share = group.best_peer.share
            axes.plot([share, share], [i - 0.42, i + 0.42], color=INK, linewidth=2, label="best peer" if i == 0 else None)
        text = f"{group.attune.share:.0f} %" + (f"   {group.lead:.2f}×" if group.lead else "")
        axes.text(max(group.attune.share, group.best_peer.share if group.best_peer else 0) + 2, i, text, va="center", fontsize=8)
    axes.set_yticks(range(len(groups)), [g.short_case + (" (of reading)" if g.attune.reads_memory else "") for g in groups],
                    fontsize=8)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlim(0, share_limit([g.attune for g in groups]) * 1.25)
    axes.axvline(100, color=INK, linewidth=0.6, linestyle=":")
    axes.set_xlabel("share of the machine's peak, %")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=8, frameon=False)
    return to_svg(figure)


def head_sweep(points, palette):
    """The rate over the number of heads, a line for each contestant."""
    figure, axes = plt.subplots(figsize=(5.2, 3.2), layout="constrained")
    heads = [h for h, _ in points]
    impls = list(dict.fromkeys(r.impl for _, g in points for r in g.rows))
    for impl in sorted(impls, key=lambda i: i != "attune"):
        rates = []
        for _, group in points:
            row = group.attune if impl == "attune" else next((r for r in group.rows if r.impl == impl), None)
            rates.append(row.rate if row else float("nan"))
        axes.plot(heads, rates, marker="o", markersize=3.5, color=palette.get(impl, INK), label=title(impl),
                  linewidth=2.2 if impl == "attune" else 1, zorder=3 if impl == "attune" else 2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(heads, [str(h) for h in heads])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("heads")
    axes.set_ylabel("GFLOP/s")
    axes.legend(fontsize=7, frameon=False)
    return to_svg(figure)


def phases(group):
    """Where the time goes, for rows that carry their phases."""
    rows = [r for r in group.rows if r.get("phases")]
    figure, axes = plt.subplots(figsize=(6, 0.4 * len(rows) + 0.8), layout="constrained")
    names = list(dict.fromkeys(p["name"] for r in rows for p in r.phases))
    for i, row in enumerate(rows):
        left = 0.0
        for phase in row.phases:
            milliseconds = phase["median_s"] * 1e3
            axes.barh(i, milliseconds, left=left, color=PEERS[names.index(phase["name"]) % len(PEERS)], height=0.6)
            if milliseconds > 0.06 * row.median_s * 1e3:
                axes.text(left + milliseconds / 2, i, phase["name"], ha="center", va="center", color="white", fontsize=8)
            left += milliseconds
    axes.set_yticks(range(len(rows)), [r.kernel for r in rows], fontsize=8)
    axes.set_xlabel("ms")
    return to_svg(figure)
