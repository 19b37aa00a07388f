# Sourced by the scripts beside this folder: creates .venv if it is missing and installs what a requirements file pins.
#
# requirements-torch.txt pins torch and Triton. Where the Python that runs this already has a torch that sees a GPU, the
# environment borrows that one and its Triton instead, and pip never replaces them.

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

# prepare_environment REQUIREMENTS [FOLDER [PYTHON]]: activates FOLDER, with REQUIREMENTS and this package installed.
prepare_environment() {
    local requirements=$1
    local folder=${2:-.venv}
    local python=${3:-${PYTHON:-python3}}
    if ! command -v "$python" >/dev/null || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "$python is not Python 3.10 or newer; name one with PYTHON=/path/to/python $0" >&2
        exit 2
    fi
    if [ ! -x "$folder/bin/python" ]; then
        make_environment "$folder" "$python"
    fi
    # Installed once for each content of the requirements; an interrupted installation leaves no stamp and starts again.
    local stamp="$folder/installed-$(basename "$requirements" .txt)"
    local wanted
    wanted=$(hash_of "$folder" "$requirements")
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        echo "installing $requirements into $folder"
        install_beside_torch "$folder" -r "$requirements"
        pip_install "$folder" --no-deps --editable .
        echo "$wanted" >"$stamp"
    fi
    # shellcheck disable=SC1091
    . "$folder/bin/activate"
}

# make_environment FOLDER PYTHON: one that borrows the packages of PYTHON if the torch among them sees a GPU.
make_environment() {
    local folder=$1
    local python=$2
    echo "making $folder"
    if ! "$python" -m venv "$folder"; then
        rm -rf "$folder"
        echo "$python cannot make $folder: see above; on Debian and Ubuntu install the package python3-venv" >&2
        exit 2
    fi
    if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        # Unlike --system-site-packages this works where PYTHON is itself in a virtual environment.
        "$python" -c "import sys
for path in sys.path:
    if path.endswith(('site-packages', 'dist-packages')):
        print(f'import site; site.addsitedir({path!r})')" \
            >"$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
    fi
}

# install_beside_torch FOLDER ARGUMENTS OF pip install: with the pinned torch, or around the one that FOLDER borrows.
install_beside_torch() {
    local folder=$1
    shift
    local borrowed
    borrowed=$(borrowed_torch "$folder")
    if [ -n "$borrowed" ]; then
        pip_install "$folder" --constraint <(echo "$borrowed") "$@"
    else
        pip_install "$folder" -r requirements-torch.txt "$@"
    fi
}

# borrowed_torch FOLDER: the versions of the torch and the Triton that it sees outside of itself, as pip's constraints.
borrowed_torch() {
    "$1/bin/python" -c 'import pathlib, sys
from importlib.metadata import distributions
for name in ("torch", "triton"):
    found = next(distributions(name=name), None)
    if found and not pathlib.Path(found.locate_file("")).is_relative_to(sys.prefix):
        print(f"{name}=={found.version}")'
}

# hash_of FOLDER REQUIREMENTS: changes with everything that decides what is installed.
hash_of() {
    cat pyproject.toml requirements*.txt "$2" |
        "$1/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

pip_install() {
    local folder=$1
    shift
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}
