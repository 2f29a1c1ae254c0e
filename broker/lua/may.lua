-- keys:
-- Whether this user may send the commands in ARGV[1] (Redis 7); executes none.
local found = {}
for i, command in ipairs(cmsgpack.unpack(ARGV[1])) do
  found[i] = redis.acl_check_cmd(unpack(command)) and 1 or 0
end
return found
