# shellcheck shell=bash
# Sourced by scripts/versions, after environment.sh: an environment for each megatron-core.

# prepare_version VERSION: what requirements-versions/VERSION.txt pins over requirements-test.txt, in .venv-versions/VERSION
prepare_version() {
    local version=$1
    local folder=.venv-versions/$version
    local requirements=requirements-versions/$version.txt
    local python=${PYTHON:-python3}
    if needs_python_3_12 "$version"; then
        python=$(python_3_12) || python=${PYTHON:-python3}
    fi
    prepare_environment requirements-test.txt "$folder" "$python"
    local stamp="$folder/installed-version"
    local wanted
    wanted=$(hash_of "$folder" "$requirements")
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    echo "installing $requirements into $folder"
    if needs_python_3_12 "$version" && ! is_python_3_12 "$folder/bin/python"; then
        unpack_megatron_core "$folder" "$requirements"
    else
        install_beside_torch "$folder" -r "$requirements"
    fi
    echo "$wanted" >"$stamp"
}

needs_python_3_12() {
    case $1 in 0.16.*) return 1 ;; esac
}

is_python_3_12() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

# A Python 3.12 or newer: PYTHON312, PYTHON, python3.12 on the path, or one of pyenv's.
python_3_12() {
    local candidate
    for candidate in "${PYTHON312:-}" "${PYTHON:-python3}" python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python; do
        if is_python_3_12 "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

# Newer megatron-core has no wheels for older Pythons. What this package imports of it is Python code that runs there
# too, so the files of the wheel for 3.12 take the place of the installed ones.
unpack_megatron_core() {
    local folder=$1
    local requirements=$2
    local site_packages
    site_packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    grep -v '^megatron-core==' "$requirements" | install_beside_torch "$folder" -r /dev/stdin
    "$folder/bin/python" -m pip uninstall --quiet --yes megatron-core
    pip_install "$folder" --no-deps --ignore-requires-python --upgrade --target "$site_packages" --only-binary=:all: \
        --python-version 3.12 --implementation cp --platform "manylinux_2_28_$(uname -m)" \
        "$(grep '^megatron-core==' "$requirements")"
}
