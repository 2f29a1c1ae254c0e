-- keys: stream
local group, me, id = unpack(ARGV)
local row = redis.pcall('XPENDING', key.stream, group, id, id, 1)
if row.err or not row[1] or row[1][2] ~= me then return 0 end
-- JUSTID renews the idle time without counting a delivery
return #redis.call('XCLAIM', key.stream, group, me, 0, id, 'JUSTID')
