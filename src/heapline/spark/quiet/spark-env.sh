# Spark's start scripts read this file before Java starts. Spark 4 requests a module about which Java always prints a
# warning. If grep supports line buffering, it removes this one line from stderr.
if : | grep --line-buffered . 2>/dev/null || [ $? -eq 1 ]; then
  exec 2> >(exec grep --line-buffered -v -x 'WARNING: Using incubator modules: jdk.incubator.vector' >&2)
fi
