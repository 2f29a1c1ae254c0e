-- keys: stream
-- Hands an entry back if it is still ours: anyone may claim it at once, and no delivery is counted.
local group, me, id = unpack(ARGV)
local row = redis.pcall('XPENDING', key.stream, group, id, id, 1)
if row.err or not row[1] or row[1][2] ~= me then return 0 end
-- idle for a day: longer than any lease
local deliveries = math.max(row[1][4] - 1, 0)
redis.call('XCLAIM', key.stream, group, me, 0, id, 'IDLE', 86400000, 'RETRYCOUNT', deliveries, 'JUSTID')
return 1
