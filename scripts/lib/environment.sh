# Sourced by the scripts beside this folder: makes .venv if there is none, installs what a requirements file pins.
#
# Without a GPU, pip finds a CPU build of torch for torch==2.13.0. Where the Python that runs this already has a torch
# that sees a GPU, the environment keeps it.

cd "$(dirname "${BASH_SOURCE[0]}")/../.."

prepare_environment() {
    local requirements=$1
    local python=${PYTHON:-python3}
    if ! command -v "$python" >/dev/null || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "$python is not Python 3.10 or newer; name one with PYTHON=/path/to/python $0" >&2
        exit 2
    fi
    local keep_torch=no
    if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        keep_torch=yes
    fi
    if [ ! -x .venv/bin/python ]; then
        echo "making .venv"
        if [ "$keep_torch" = yes ]; then
            "$python" -m venv --system-site-packages .venv
        else
            "$python" -m venv .venv
        fi
    fi
    # Installed once for each content of the requirements; an interrupted installation leaves no stamp and starts again.
    local stamp=".venv/installed-$(basename "$requirements" .txt)"
    local wanted
    wanted=$(cat pyproject.toml requirements.txt "$requirements" | .venv/bin/python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        echo "installing $requirements into .venv"
        if [ "$keep_torch" = no ]; then
            .venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
        fi
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$requirements"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
        echo "$wanted" >"$stamp"
    fi
    # shellcheck disable=SC1091
    . .venv/bin/activate
}
