-- keys:
-- One step through Redis's keys. ARGV: where the one before it ended, of which keys (a pattern), and how many
-- it looks at. Where it ended, and their names. Sites may write names of any length: what has a longer one
-- than any of ours goes, since nobody reads it, and its name stays here.
local page, names = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3]), {}
for _, name in ipairs(page[2]) do
  if #name > 4096 then
    redis.call('PEXPIRE', name, 1)
  else
    names[#names + 1] = name
  end
end
return {page[1], names}
