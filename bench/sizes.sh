#!/usr/bin/env bash
# Lines per Python file now and at the merge base with main: growth is a decision, so it is shown.
set -euo pipefail
cd "$(dirname "$0")/.."
base=$(git merge-base HEAD "${1:-origin/main}" 2>/dev/null || git rev-list --max-parents=0 HEAD | tail -n 1)
total=0 before=0
printf '%7s %7s %7s  %s\n' now base change file
while IFS= read -r file; do
    now=$(wc -l <"$file")
    was=$( (git show "$base:$file" 2>/dev/null || true) | wc -l)
    total=$((total + now)) before=$((before + was))
    printf '%7d %7d %+7d  %s\n' "$now" "$was" $((now - was)) "$file"
done < <(git ls-files 'dflash/*.py' | sort)
printf '%7d %7d %+7d  %s\n' "$total" "$before" $((total - before)) "total (dflash/)"
