-- keys:
-- Bounds gateways' registers (rest), as their users may write what they like. ARGV: the run's number
-- of devices, how many bytes a value may have, and of a stream, how many entries and bytes. Deletes
-- fields that are no device's or too long, looking at 1,000 of each register, and whole strings and
-- streams that are too long. Returns the registers of which something was deleted.
local devices, most = tonumber(ARGV[1]), tonumber(ARGV[2])
local trimmed = {}
for i = first_rest, #KEYS do
  local name, bad = KEYS[i], 0
  local is = redis.call('TYPE', name).ok
  if is == 'hash' then
    for _, field in ipairs(redis.call('HRANDFIELD', name, 1000)) do
      local is_number = #field < 16 and (field == '0' or string.match(field, '^[1-9]%d*$'))
      if not is_number or tonumber(field) >= devices or redis.call('HSTRLEN', name, field) > most then
        bad = bad + redis.call('HDEL', name, field)
      end
    end
  elseif is == 'string' and redis.call('STRLEN', name) > most then
    bad = redis.call('UNLINK', name)
  elseif is == 'stream' and (redis.call('XLEN', name) > tonumber(ARGV[3])
      or redis.call('MEMORY', 'USAGE', name, 'SAMPLES', 0) > tonumber(ARGV[4])) then
    bad = redis.call('UNLINK', name)
  end
  if bad > 0 then trimmed[#trimmed + 1] = name end
end
return trimmed
