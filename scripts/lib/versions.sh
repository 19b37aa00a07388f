# shellcheck shell=bash
# scripts/versions sources this file after environment.sh. It makes an environment for each megatron-core.

# prepare_version VERSION: install requirements/versions/VERSION.txt over requirements/test.txt in its environment
prepare_version() {
    local version=$1
    local folder=.venv-versions/$version
    local requirements=requirements/versions/$version.txt
    local pythons=(3.12) # newer releases have no wheels for older Pythons
    case $version in 0.16.*) pythons=(3.11 3.10) ;; esac
    local python
    if ! python=$(find_python "${pythons[@]}"); then
        echo "megatron-core $version is tested with Python ${pythons[*]}, and none is found; name one with PYTHON=/path/to/python" >&2
        exit 2
    fi
    prepare_environment requirements/test.txt "$folder" "$python"
    local stamp="$folder/installed-version"
    local wanted
    wanted=$(hash_of "$folder" "$requirements")
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        echo "installing $requirements into $folder"
        install_beside_torch "$folder" -r "$requirements"
        echo "$wanted" >"$stamp"
    fi
    if [ "$version" = main ]; then use_checkout "$folder"; fi
}

# use_checkout FOLDER: every process in this environment uses the megatron-core of MEGATRON_LM_PATH.
use_checkout() {
    "$1/bin/python" -m pip uninstall --quiet --yes megatron-core
    (cd "$MEGATRON_LM_PATH" && pwd) >"$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/checkout.pth"
}

# is_checkout_of VERSION: whether MEGATRON_LM_PATH is of its release series; for main, any checkout with a version.
is_checkout_of() {
    local package="${MEGATRON_LM_PATH:-}/megatron/core/package_info.py"
    [ -f "$package" ] && { [ "$1" = main ] || [ "$(sed -n 's/^MINOR = //p' "$package")" = "$(echo "$1" | cut -d. -f2)" ]; }
}

# tested_commit: the tested commit of main.
tested_commit() {
    grep -oE '\b[0-9a-f]{40}\b' requirements/versions/main.txt
}

# say_commit: print a sentence if the checkout is not at the tested commit of main.
say_commit() {
    local there tested
    tested=$(tested_commit)
    # A checkout without .git may be inside another repository, whose commit means nothing here.
    if [ ! -e "$MEGATRON_LM_PATH/.git" ] || ! there=$(git -C "$MEGATRON_LM_PATH" rev-parse HEAD 2>/dev/null); then
        echo "$MEGATRON_LM_PATH has no history that git can read: check that it is main at ${tested:0:10}, the tested commit"
    elif [ "$there" != "$tested" ]; then
        echo "$MEGATRON_LM_PATH is at ${there:0:10}, and main is tested at ${tested:0:10}: changes in between can cause failures"
    fi
}
