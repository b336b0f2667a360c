#!/bin/sh
# Prints the path of a working Python >= 3.12 that can create virtual environments, also on stderr.
# Usage: tools/find_python.sh [MAJOR.MINOR]    With a version, accepts only that one. Exits with 1 if there is none.
#
# Runs each candidate, because its name is not enough: a pyenv shim is on PATH even if no version is selected, and
# Debian ships a Python without ensurepip.
want=${1:-}

# probe CANDIDATE LOWEST HIGHEST: prints the interpreter's own path if it is a CPython in that range of versions.
probe() {
  "$1" -c '
import sys, sysconfig, venv, ensurepip
low, high = (tuple(map(int, arg.split("."))) for arg in sys.argv[1:3])
fits = low <= sys.version_info[:2] <= high
stock = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
if not (fits and stock and sys.executable):
    sys.exit(1)
sys.stdout.write(sys.executable)
' "$2" "$3" 2>/dev/null
}

# search LOWEST HIGHEST: the first candidate that passes.
search() {
  for candidate in "$PYTHON" python3 python3.13 python3.12 python3.14 python3.15 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python; do
    if [ -n "$candidate" ] && found=$(probe "$candidate" "$1" "$2"); then
      echo "using Python at $found" >&2
      echo "$found"
      exit 0
    fi
  done
}

if [ -n "$want" ]; then
  search "$want" "$want"
else
  if [ -n "$PYTHON" ] && ! probe "$PYTHON" 3.12 3.99 >/dev/null; then
    echo "PYTHON=$PYTHON is not a working Python >= 3.12; looking for another" >&2
  elif [ -n "$PYTHON" ]; then
    search 3.12 3.99
  fi
  search 3.12 3.13 # every pinned package has wheels for these versions
  search 3.12 3.99
fi
exit 1
