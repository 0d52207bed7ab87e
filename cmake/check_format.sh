#!/usr/bin/env bash
# Says which of the C++ files (all that git does not ignore) are not formatted as .clang-format has it, and fails if
# there are any; --fix formats them. Without a clang-format that can judge: one line that begins with "check_format:
# skipped" and status 0 (for ctest: SKIP_REGULAR_EXPRESSION).
#
# clang-format's versions format the same style differently, so that only this one's judgement can fail the check.
set -euo pipefail
wanted=14

fix=0
case ${1:-} in
'') ;;
--fix) fix=1 ;;
*)
    echo "check_format: argument $1; expected nothing or --fix" >&2
    exit 2
    ;;
esac

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

formatter=""
found=""
for name in clang-format-$wanted clang-format; do
    command -v "$name" >/dev/null || continue
    version=$("$name" --version | sed -n 's/.*version \([0-9]*\).*/\1/p')
    [[ $version == "$wanted" ]] && formatter=$name && break
    found=" (found: $name $version)"
done
if [[ -z $formatter ]]; then
    echo "check_format: skipped: no clang-format $wanted on PATH$found"
    exit 0
fi

# Outside a git checkout (an archive of the sources) there is no list to go by.
if ! git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    echo "check_format: skipped: no git checkout"
    exit 0
fi
mapfile -d '' -t files < <(git ls-files -z --cached --others --exclude-standard -- '*.h' '*.hpp' '*.cpp' '*.cc')
present=()
for file in "${files[@]}"; do
    [[ ! -f $file ]] || present+=("$file")
done
if ((${#present[@]} == 0)); then
    echo "check_format: no C++ file in the checkout; expected some" >&2
    exit 1
fi

if ((fix)); then
    "$formatter" -i --style=file -- "${present[@]}"
    exit 0
fi
bad=0
for file in "${present[@]}"; do
    if ! difference=$("$formatter" --style=file "$file" | diff -u --label "$file" --label formatted "$file" -); then
        bad=$((bad + 1))
        head -n 20 <<<"$difference"
    fi
done
if ((bad)); then
    echo "check_format: $bad of ${#present[@]} files are not formatted; cmake/check_format.sh --fix formats them"
    exit 1
fi
echo "check_format: ${#present[@]} files are formatted"
