-- keys: stream
local group, consumer = unpack(ARGV)
local waiting = redis.pcall('XPENDING', key.stream, group, '-', '+', 1, consumer)
if waiting.err or #waiting > 0 then return 0 end
redis.call('XGROUP', 'DELCONSUMER', key.stream, group, consumer)
return 1
