# Read by Spark's start scripts before Java starts. Spark 4 asks Java for a module of which Java then warns, each time
# and whatever it is told: that one line is left out of stderr, where there is a grep that can do it as lines come.
if : | grep --line-buffered . 2>/dev/null || [ $? -eq 1 ]; then
  exec 2> >(exec grep --line-buffered -v -x 'WARNING: Using incubator modules: jdk.incubator.vector' >&2)
fi
