# A folder on the way to an artifact is a link out of the work folder.
for a in "$@"; do
    rm -rf "$a"
    ln -s /etc "$a"
    [ "$(dirname "$a")" = / ] && continue # or all there is would be copied, up to the limit of memory
    mv "$(dirname "$a")" /tmp/away 2>/dev/null && ln -s / "$(dirname "$a")"
done
