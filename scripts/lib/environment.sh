# The scripts in the parent folder source this file. It creates .venv if it is missing and installs a requirements file.
#
# requirements/base.txt pins the newest tested megatron-core for Python 3.12, and an older one for older Pythons. So
# Python 3.12 is preferred; PYTHON overrides the choice.
#
# requirements/torch.txt pins torch and Triton. If the Python that runs this already has a torch that sees a GPU, the
# environment uses that torch and its Triton instead, and pip never replaces them.

# The path of the script, before the folder changes.
called=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# answer_help ARGUMENTS: if they contain --help or -h, print the comment at the top of the script, and exit.
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

# find_python VERSION ...: the first Python of the first of these versions, for example 3.12, that is found as PYTHON,
# on the path, or in pyenv. A Python on the path can be pyenv's placeholder, which does not run.
find_python() {
    local version candidate
    for version in "$@"; do
        for candidate in "${PYTHON:-}" python3 "python$version" \
            "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
            if [ "$(version_of "$candidate")" = "$version" ]; then
                echo "$candidate"
                return
            fi
        done
    done
    return 1
}

# version_of PYTHON: its version, for example 3.12; empty if it does not run.
version_of() {
    if [ -n "$1" ]; then
        "$1" -c 'import sys; print(f"{sys.version_info[0]}.{sys.version_info[1]}")' 2>/dev/null || true
    fi
}

# core_for VERSION: the megatron-core that requirements/base.txt pins for this version of Python.
core_for() {
    local comparison='<'
    if [ "${1#3.}" -ge 12 ]; then comparison='>='; fi
    sed -n "s/^megatron-core==\([0-9.]*\); python_version $comparison .*/\1/p" requirements/base.txt
}

# prepare_environment REQUIREMENTS [FOLDER PYTHON]: activates FOLDER, with REQUIREMENTS and this package installed.
prepare_environment() {
    local requirements=$1
    local folder=${2:-.venv}
    local python=${3:-${PYTHON:-}}
    local why="as PYTHON is set"
    # If its Python does not run, or with this mark, its creation was interrupted or its Python was removed.
    if [ -z "$(version_of "$folder/bin/python")" ] || [ -e "$folder/unfinished" ]; then
        if [ -z "$python" ]; then choose_python; fi
        check_python "$python"
        make_environment "$folder" "$python"
    elif [ -n "$python" ]; then
        check_python "$python"
        check_same_version "$folder" "$python"
    else
        why="as $folder has them$(newer_than "$folder")"
    fi
    local has
    has=$(version_of "$folder/bin/python")
    if [ "$folder" = .venv ]; then echo "Python $has and megatron-core $(core_for "$has"), $why"; fi
    # Install once per content of the requirements; an interrupted installation leaves no stamp and starts again.
    local stamp="$folder/installed-$(basename "$requirements" .txt)"
    local wanted
    wanted=$(hash_of "$folder" "$requirements")
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        echo "installing $requirements into $folder"
        install_beside_torch "$folder" -r "$requirements"
        # Megatron-Bridge is installed without its dependencies; that file explains why.
        pip_install "$folder" --no-deps --editable . -r requirements/bridge.txt
        echo "$wanted" >"$stamp"
    fi
    # shellcheck disable=SC1091
    . "$folder/bin/activate"
}

# choose_python: sets python and why, unless PYTHON is set.
choose_python() {
    python=python3
    if sees_gpu python3; then
        why="because its torch sees a GPU"
    elif python=$(find_python 3.12); then
        why="the newest that are tested"
    else
        python=$(find_python 3.11 3.10 || echo python3)
        why="because no Python 3.12 is found, which newer ones need"
    fi
}

check_python() {
    if ! [[ $(version_of "$1") =~ ^3\.[1-9][0-9]$ ]]; then
        echo "$1 is not Python 3.10 or newer; name one with PYTHON=/path/to/python $0" >&2
        exit 2
    fi
}

check_same_version() {
    local has wanted
    has=$(version_of "$1/bin/python")
    wanted=$(version_of "$2")
    if [ "$has" != "$wanted" ]; then
        echo "$2 is Python $wanted, and $1 was made with Python $has; remove $1 to make it again" >&2
        exit 2
    fi
}

# newer_than FOLDER: a remark if a new FOLDER would have a newer megatron-core.
newer_than() {
    if [[ $(version_of "$1/bin/python") =~ ^3\.1[01]$ ]] && [ -z "$(borrowed_torch "$1")" ] && find_python 3.12 >/dev/null; then
        echo "; remove $1 to get Python 3.12 and megatron-core $(core_for 3.12)"
    fi
}

# sees_gpu PYTHON: whether its torch sees a GPU.
sees_gpu() {
    "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

# make_environment FOLDER PYTHON: make an environment that uses the packages of PYTHON if their torch sees a GPU.
make_environment() {
    local folder=$1
    local python=$2
    echo "making $folder with $python"
    rm -rf "$folder"
    mkdir -p "$folder"
    touch "$folder/unfinished"
    if ! "$python" -m venv "$folder"; then
        rm -rf "$folder"
        echo "$python cannot make $folder: see above; on Debian and Ubuntu install the package python3-venv" >&2
        exit 2
    fi
    if sees_gpu "$python"; then
        # Unlike --system-site-packages, this works if PYTHON itself is in a virtual environment.
        "$python" -c "import sys
for path in sys.path:
    if path.endswith(('site-packages', 'dist-packages')):
        print(f'import site; site.addsitedir({path!r})')" \
            >"$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
    fi
    rm "$folder/unfinished"
}

# install_beside_torch FOLDER ARGUMENTS OF pip install: install with the pinned torch, or with the torch FOLDER borrows.
install_beside_torch() {
    local folder=$1
    shift
    local borrowed
    borrowed=$(borrowed_torch "$folder")
    if [ -n "$borrowed" ]; then
        pip_install "$folder" --constraint <(echo "$borrowed") "$@"
    else
        pip_install "$folder" -r requirements/torch.txt "$@"
    fi
}

# borrowed_torch FOLDER: the versions of torch and Triton that it uses from outside, as pip's constraints.
borrowed_torch() {
    "$1/bin/python" -c 'import pathlib, sys
from importlib.metadata import distributions
for name in ("torch", "triton"):
    found = next(distributions(name=name), None)
    if found and not pathlib.Path(found.locate_file("")).is_relative_to(sys.prefix):
        print(f"{name}=={found.version}")'
}

# hash_of FOLDER REQUIREMENTS: changes with every input of the installation.
hash_of() {
    cat pyproject.toml requirements/*.txt "$2" |
        "$1/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# run_pytest ARGUMENTS: use more workers than cores, because many tests wait for a process that they started, but at
# most four, to limit memory. A worker runs all tests of a file, because they share state, in the order of tests/conftest.py.
run_pytest() {
    local workers
    workers=$(python -c 'import os; print(min(4, max(1, os.cpu_count() * 3 // 2)))')
    python -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
}

# pip_install FOLDER ARGUMENTS OF pip install. Without --no-warn-conflicts the second script that is called would print as
# errors all that Megatron-Bridge asks for and that is left out on purpose: see requirements/bridge.txt.
pip_install() {
    local folder=$1
    shift
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-warn-conflicts "$@"
}
