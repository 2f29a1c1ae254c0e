-- keys: leader tokens
-- Takes a role's lease and issues a token larger than all before it. A process of the same name is
-- the same pod or a supervised restart: it need not wait for its own lease to expire.
local role, name, nonce, ttl, at_least = unpack(ARGV)
local holder = redis.call('GET', key.leader)
if holder and string.match(holder, '^(.*)|') ~= name then
  return 0
end
local before = tonumber(string.match(redis.call('HGET', key.tokens, role) or '0', '^%d+'))
local token = math.max(before, tonumber(at_least)) + 1
room()
redis.call('HSET', key.tokens, role, string.format('%d:%s', token, nonce))
redis.call('SET', key.leader, name .. '|' .. nonce, 'PX', ttl)
return token
