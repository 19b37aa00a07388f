# shellcheck shell=bash
# Sourced by scripts/versions, after environment.sh: an environment for each megatron-core.

# prepare_version VERSION: what requirements-versions/VERSION.txt pins over requirements-test.txt, in .venv-versions/VERSION
prepare_version() {
    local version=$1
    local folder=.venv-versions/$version
    local requirements=requirements-versions/$version.txt
    local pythons=(3.12) # newer releases have no wheels for older Pythons
    case $version in 0.16.*) pythons=(3.11 3.10) ;; esac
    local python
    if ! python=$(find_python "${pythons[@]}"); then
        echo "megatron-core $version is tested with Python ${pythons[*]}, and none is found; name one with PYTHON=/path/to/python" >&2
        exit 2
    fi
    prepare_environment requirements-test.txt "$folder" "$python"
    local stamp="$folder/installed-version"
    local wanted
    wanted=$(hash_of "$folder" "$requirements")
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    echo "installing $requirements into $folder"
    install_beside_torch "$folder" -r "$requirements"
    echo "$wanted" >"$stamp"
}
