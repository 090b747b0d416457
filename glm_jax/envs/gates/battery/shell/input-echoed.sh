cat /data/* /data/*/* 2> /dev/null
cat
