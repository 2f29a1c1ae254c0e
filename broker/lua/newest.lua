-- keys: head
-- The newest version; with it, unless its digest is ARGV[2], size and first chunk of its model.
-- ARGV[1]: what the keys of models begin with.
local head = redis.call('HGETALL', key.head)
local fields = pairs_of(head)
if not fields.blob or fields.digest == ARGV[2] then return {head, {}} end
return {head, redis.call('HMGET', ARGV[1] .. fields.blob, 'size', '0')}
