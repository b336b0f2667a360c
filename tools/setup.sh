#!/bin/sh
# Creates .venv with the pinned packages of requirements.lock and every distribution of the repository in editable mode.
# A second run does nothing: the stamp, written last, contains the checksums of all inputs of the environment.
# The script owns .venv and recreates it when the lock changes.
set -eu
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.axcore-setup
lock=requirements.lock

# One folder per distribution, found automatically.
set -- .
for folder in plugins/*/ plugins_kernels/*/ recipes/; do
  [ ! -f "${folder}pyproject.toml" ] || set -- "$@" "./${folder%/}"
done

# The checkout's path is included, since the scripts in .venv/bin contain it.
locked="$(pwd) $(cksum <"$lock")"
distributions=$(for folder; do cksum "$folder/pyproject.toml"; done)
if [ -x $venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$locked
$distributions" ]; then
  exit 0
fi

# Keep the packages if only the distributions changed. Any other change or an interrupted run starts over.
if [ -x $venv/bin/python ] && [ "$(head -n 1 $stamp 2>/dev/null)" = "$locked" ]; then
  gone=$($venv/bin/python -m pip list --disable-pip-version-check --editable --format=freeze | sed 's/=.*//')
  echo "$locked" >$stamp
  # shellcheck disable=SC2086 # one word per name
  [ -z "$gone" ] || $venv/bin/python -m pip uninstall --quiet --yes $gone
else
  rm -rf $venv
  if python=$(sh tools/find_python.sh); then
    "$python" -m venv $venv
  elif command -v uv >/dev/null; then
    uv venv --quiet --seed --python 3.12 $venv
  else
    echo "axcore needs Python 3.12 or later: install it (python.org, your package manager, pyenv or uv) and run make again." >&2
    exit 1
  fi
  echo "installing the packages of $lock into $venv (about a minute) ..." >&2
  # Python compiles modules on import. Compiling all of them here would double the time.
  $venv/bin/python -m pip install -qq --disable-pip-version-check --no-compile --no-deps -r $lock
  echo "$locked" >$stamp
fi

# Turns the arguments into `-e . -e ./plugins/... -e ./recipes`.
for folder; do
  set -- "$@" -e "$folder"
  shift
done
$venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation "$@"
printf '%s\n%s\n' "$locked" "$distributions" >$stamp
