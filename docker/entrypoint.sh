#!/usr/bin/env bash
# What comes after the image's name is a program with its arguments, or else a command of samestep:
#   docker run IMAGE                      samestep --help
#   docker run IMAGE train FILE           samestep train FILE
#   docker run IMAGE samestep train FILE  the same
#   docker run IMAGE bash                 bash
set -euo pipefail

if [[ $# -eq 0 ]]; then
  set -- samestep --help
# `type -P` looks for files only: `export` and `jobs` are commands of samestep, and of every shell.
# `diff` and `watch` are programs, too: call those by their paths, as /usr/bin/diff.
elif [[ $1 == -* || $1 == diff || $1 == watch ]] || ! type -P -- "$1" >/dev/null; then
  set -- samestep "$@"
fi

# The command takes this process over, so signals reach it and its exit code is the container's.
exec "$@"
