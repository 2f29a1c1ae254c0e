-- keys: leader tokens
-- Renews a lease: 'held', or why not ('fenced', 'lost').
local role, token, holder, ttl = unpack(ARGV)
local foreign = fenced(token, role)
if foreign then return foreign end
room()
redis.call('SET', key.leader, holder, 'PX', ttl)
return 'held'
