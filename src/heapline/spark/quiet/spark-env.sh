# Read by Spark's start scripts before Java starts. Spark 4 loads a Java module about which Java always prints a warning.
# That one line is removed from stderr, if grep can filter line by line.
if : | grep --line-buffered . 2>/dev/null || [ $? -eq 1 ]; then
  exec 2> >(exec grep --line-buffered -v -x 'WARNING: Using incubator modules: jdk.incubator.vector' >&2)
fi
