# Sourced by the scripts beside this folder: makes .venv if there is none, installs what a requirements file pins.
#
# Without a GPU, pip finds a CPU build of torch for torch==2.13.0. Where the Python that runs this already has a torch
# that sees a GPU, the environment keeps it.

# As it was called, before this goes elsewhere.
called=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# answer_help ARGUMENTS: where they ask for help, print what the script says of itself at its top, and do nothing more.
answer_help() {
    local argument
    for argument in "$@"; do
        case $argument in
        --) return ;;
        -h | --help)
            sed -n -e 1d -e '/^#/!q' -e 's/^# \{0,1\}//p' "$called"
            exit 0
            ;;
        esac
    done
}

# prepare_environment REQUIREMENTS [FOLDER [PYTHON]]
prepare_environment() {
    local requirements=$1
    local folder=${2:-.venv}
    local python=${3:-${PYTHON:-python3}}
    if ! command -v "$python" >/dev/null || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "$python is not Python 3.10 or newer; name one with PYTHON=/path/to/python $0" >&2
        exit 2
    fi
    local keep_torch=no
    if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        keep_torch=yes
    fi
    if [ ! -x "$folder/bin/python" ]; then
        echo "making $folder"
        if [ "$keep_torch" = yes ]; then
            "$python" -m venv --system-site-packages "$folder"
        else
            "$python" -m venv "$folder"
        fi
    fi
    # Installed once for each content of the requirements; an interrupted installation leaves no stamp and starts again.
    local stamp="$folder/installed-$(basename "$requirements" .txt)"
    local wanted
    wanted=$(hash_of "$folder" pyproject.toml requirements.txt "$requirements")
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        echo "installing $requirements into $folder"
        if [ "$keep_torch" = no ]; then
            pip_install "$folder" torch==2.13.0
        fi
        pip_install "$folder" -r "$requirements"
        pip_install "$folder" --no-deps --editable .
        echo "$wanted" >"$stamp"
    fi
    # shellcheck disable=SC1091
    . "$folder/bin/activate"
}

hash_of() {
    local folder=$1
    shift
    cat "$@" | "$folder/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

pip_install() {
    local folder=$1
    shift
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}
