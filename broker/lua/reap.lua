-- keys: stream
-- Removes idle consumers. One with pending entries stays, since they would be deleted with it.
local group, idle = ARGV[1], tonumber(ARGV[2])
local consumers = redis.pcall('XINFO', 'CONSUMERS', key.stream, group)
if consumers.err then return {} end
local reaped = {}
for _, flat in ipairs(consumers) do
  local consumer = {}
  for i = 1, #flat, 2 do consumer[flat[i]] = flat[i + 1] end
  if consumer.pending == 0 and consumer.idle >= idle then
    redis.call('XGROUP', 'DELCONSUMER', key.stream, group, consumer.name)
    reaped[#reaped + 1] = consumer.name
  end
end
return reaped
