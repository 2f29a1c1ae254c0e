-- keys:
-- Quarantines foreign values: keys of another type, and streams with ids over a day in the future,
-- to which it may be impossible to append. rest: pairs of a key and its quarantine key. ARGV: how
-- long to keep quarantined keys (ms), then for each pair the type and the most entries (0: no
-- limit; a longer stream is deleted). Returns what was found: pairs of a key and a description.
local found = {}
for i = first_rest, #KEYS, 2 do
  local name, aside, n = KEYS[i], KEYS[i + 1], 2 + i - first_rest
  local wanted, most = ARGV[n], tonumber(ARGV[n + 1])
  local is, why = redis.call('TYPE', name).ok, nil
  if is ~= 'none' and is ~= wanted then
    why = 'it held a ' .. is .. ', not a ' .. wanted
  elseif is == 'stream' then
    local about = redis.call('XINFO', 'STREAM', name)
    for j = 1, #about, 2 do
      if about[j] == 'last-generated-id' then
        local ms = tonumber(string.match(about[j + 1], '^%d+'))
        if ms > (redis.call('TIME')[1] + 86400) * 1000 then why = 'an entry had the id ' .. about[j + 1] end
      end
    end
    if not why and most > 0 and redis.call('XLEN', name) > most then
      why = 'it had more than ' .. ARGV[n + 1] .. ' entries'
      redis.call('UNLINK', name)
    end
  end
  if why then
    if redis.call('EXISTS', name) == 1 then
      redis.call('RENAME', name, aside)
      redis.call('PEXPIRE', aside, ARGV[1])
    end
    found[#found + 1] = {name, why}
  end
end
return found
