-- keys: stream
-- Renews the leases of many entries: returns those that are still this consumer's. ARGV: group,
-- consumer, ids.
local group, me = ARGV[1], ARGV[2]
local ours = {}
for n = 3, #ARGV do
  local row = redis.pcall('XPENDING', key.stream, group, ARGV[n], ARGV[n], 1)
  if row.err then return {} end
  if row[1] and row[1][2] == me then ours[#ours + 1] = ARGV[n] end
end
if #ours == 0 then return {} end
-- JUSTID renews the idle time without counting a delivery; it comes after the ids
ours[#ours + 1] = 'JUSTID'
return redis.call('XCLAIM', key.stream, group, me, 0, unpack(ours))
