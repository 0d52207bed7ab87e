"""What a page is made of. A section builder takes a Results and returns a list of Section, empty where it has nothing to say
about this file; a new kind of result (a tuner's, say) is one more builder in BUILDERS."""
import dataclasses

import limits
import plots
import tuned
from results import geometric_mean, head_sweeps, title


@dataclasses.dataclass
class Section:
    heading: str
    template: str  # a block of page.html
    data: dict


def summary(results):
    sections = []
    for threads in results.thread_counts:
        groups = [g for g in results.groups if g.threads == threads and g.attune and not g.compares_kernels]
        if not groups:
            continue
        leads = [g.lead for g in groups if g.lead]
        text = ""
        if leads:
            text = (f"attune is {geometric_mean(leads):.2f} times as fast as the best peer in the geometric mean of {len(leads)} "
                    f"cases, {min(leads):.2f} times at least.")
        sections.append(Section(f"All cases, {threads} thread{'s' * (threads != 1)}", "picture",
                                {"text": text, "svg": plots.overview(groups)}))
    return sections


def sweeps(results):
    palette = plots.colours(results.impls)
    found = head_sweeps(results)
    if not found:
        return []
    pictures = [{"caption": f"{name}, {threads} thread{'s' * (threads != 1)}", "svg": plots.head_sweep(points, palette)}
                for (threads, name), points in found.items()]
    return [Section("The same width, more heads", "pictures", {"pictures": pictures})]


def table(results):
    impls = results.impls
    rows = []
    for group in results.groups:
        if group.compares_kernels:
            continue
        cells = {r.impl: r for r in group.rows}
        rows.append({"group": group, "cells": [cells.get(i) for i in impls]})
    return [Section("Table", "table", {"impls": [title(i) for i in impls], "rows": rows})] if rows else []


def cases(results):
    palette = plots.colours(results.impls)
    entries = []
    for case, groups in results.cases():
        shown = [g for g in groups if g.rows]
        entry = {"case": case, "bars": [plots.bars_of_case(g, palette) for g in shown], "groups": groups,
                 "phases": [{"caption": f"Phases, {g.threads} threads", "svg": plots.phases(g)} for g in shown
                            if any(r.get("phases") for r in g.rows)]}
        entries.append(entry)
    return [Section("Case by case", "cases", {"entries": entries})] if entries else []


def searches(results):
    found = tuned.searches(results)
    entries = []
    for s in found:
        strategies = list(dict.fromkeys(t["strategy"] for t in s.timed if t["strategy"]))
        pictures = [{"caption": f"{name}: each knob's values; the bar is the best with it", "svg": tuned.sensitivity(s, name)} for name in strategies]
        entries.append({"search": s, "gain": tuned.gain(s),
                        "curves": [{"caption": "Candidates, and the best so far", "svg": tuned.best_so_far(s)},
                                   *({"caption": "Share of the peak of each candidate", "svg": svg} for svg in [tuned.shares(s)] if svg)],
                        "pictures": [p for p in pictures if p["svg"]]})
    return [Section("Tuned", "tuned", {"entries": entries})] if entries else []


def races(results):
    pictures = [{"caption": f"{c['case']}, {c['threads']} thread{'s' * (c['threads'] != 1)}", "svg": tuned.race(c)} for c in tuned.races(results)]
    return [Section("Searches side by side", "pictures", {"pictures": pictures})] if pictures else []


def of_most_threads(results):
    """{type: its groups}, with as many threads as the file has."""
    most = max(results.thread_counts, default=0)
    return {dtype: [g for g in results.groups if g.dtype == dtype and g.threads == most] for dtype in results.dtypes}


def roofline(results):
    pictures = [{"caption": f"{dtype}, {limits.threads_text(groups[0].threads)}", "svg": svg}
                for dtype, groups in of_most_threads(results).items() if groups
                if (svg := limits.roofline(groups, results.machine.get("read_gbps")))]
    text = "A point a case. Both roofs were measured with the result; a case whose arrays fit into the caches may be above the read loop's."
    return [Section("Roofline", "pictures", {"text": text, "pictures": pictures})] if pictures else []


def memory(results):
    pictures = [{"caption": f"{dtype}, {limits.threads_text(groups[0].threads)}", "svg": svg}
                for dtype, groups in of_most_threads(results).items() if groups if (svg := limits.memory(groups))]
    text = ("Beside Q, K, V and O. What an unfused form writes for its scores grows with n²; a fused kernel's workspace stays flat, "
            "or grows with n where it holds packed keys. A best peer at the left edge did not grow.")
    return [Section("Memory", "pictures", {"text": text, "pictures": pictures})] if pictures else []


def lengths(results):
    palette = plots.colours(results.impls)
    pictures = []
    for (threads, case), points in limits.length_series(results).items():
        time, space = limits.over_length(points, palette)
        pictures += [{"caption": f"{case}, {limits.threads_text(threads)}: {what}", "svg": svg} for what, svg in (("time", time), ("memory", space))]
    return [Section("Over n", "pictures", {"pictures": pictures})] if pictures else []


BUILDERS = [summary, roofline, memory, lengths, searches, races, sweeps, table, cases]


def heads(path, sentence):
    import weights

    text = f"Sentence {sentence}: a row a query token, a column a key token; darker is more, on a scale of square roots."
    return Section("Attention weights", "pictures", {"text": text, "pictures": weights.pictures(path, sentence)})


def build(results):
    return [section for builder in BUILDERS for section in builder(results)]
