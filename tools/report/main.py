"""attune report: turns what bench, compare and tune wrote with --json into one self-contained page, or into tables of Markdown."""
import argparse
import os
import pathlib
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import markdown  # noqa: E402
from results import ResultError, Results  # noqa: E402


def page(results, weights, sentence):
    import jinja2
    from sections import build, heads

    sections = build(results) + ([heads(weights, sentence)] if weights else [])
    loader = jinja2.FileSystemLoader(os.path.dirname(os.path.abspath(__file__)))
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
                                     lstrip_blocks=True)
    return environment.get_template("page.html").render(results=results, sections=sections)


def write(path, text):
    """The whole file or nothing."""
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ResultError(f"-o {path}: cannot be written ({error.strerror})") from error


def main():
    parser = argparse.ArgumentParser(prog="attune report", description=__doc__)
    parser.add_argument("results", metavar="RESULT.json", nargs="+", help="what bench, compare or tune wrote with --json; several with --markdown")
    parser.add_argument("-o", "--output", metavar="FILE", help="the page (default: RESULT.html), or the Markdown file (default: "
                        "standard output). A Markdown file that has the marks of docs/performance.md keeps what is around them")
    parser.add_argument("--markdown", action="store_true", help="tables of Markdown in place of a page")
    parser.add_argument("--weights", metavar="FILE", help="attention weights for the page, a heat map a head: what the sentence encoder of examples/ "
                        "writes with --dump-weights")
    parser.add_argument("--sentence", type=int, default=0, metavar="I", help="which of the sentences in --weights (default: 0)")
    arguments = parser.parse_args()
    try:
        files = [Results(path) for path in arguments.results]
        if not arguments.markdown:
            if len(files) > 1:
                raise ResultError(f"{files[1].path}: is a second result; expected one for a page, several with --markdown")
            results = files[0]
            output = arguments.output or str(results.path.with_suffix(".html"))
            write(output, page(results, arguments.weights, arguments.sentence))
            print(output)
            return 0
        table = markdown.render(files)
        if not arguments.output:
            print(table, end="")
            return 0
        path = pathlib.Path(arguments.output)
        around = markdown.into(path.read_text(), table) if path.exists() else None
        if path.exists() and around is None:
            raise ResultError(f"-o {path}: lacks the lines '{markdown.BEGIN}' and '{markdown.END}'; expected them around the table")
        write(path, around or table)
        return 0
    except ResultError as error:
        print(f"attune: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
