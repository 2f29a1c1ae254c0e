-- keys: leader
if redis.call('GET', key.leader) == ARGV[1] then redis.call('DEL', key.leader) end
return 1
