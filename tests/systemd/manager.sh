#!/bin/sh
# A user manager of systemd with nothing of this machine in its hands: manager.sh DIRECTORY NAME UID SYSTEMD [LINGERING]
#
# To be run by root in a mount namespace of its own. The manager gets a control group of its own, and a namespace of
# control groups whose root that is. (Without, one that starts in the machine's root group takes every process there
# for its own and moves it.) UID 0 is the manager of root. Any other is one without privileges: a user namespace maps
# this user to that number, so that it can read what we can and do nothing that needs a capability.
#
# LINGERING: a user for whom lingering is on.
#
# Ends when standard input ends: the manager in order, then whatever is left in its control group.
set -eu
directory=$1 name=$2 uid=$3 systemd=$4
group=$directory/cgroup/$name

mkdir "$directory/cgroup"
mount -t cgroup2 none "$directory/cgroup"
mkdir "$group"
mkdir -p /run/systemd
mount -t tmpfs none /run/systemd
mkdir /run/systemd/system # that it exists is what tells a program that systemd runs here
mount -t tmpfs none /var/lib/systemd
mkdir /var/lib/systemd/linger
[ "$#" -lt 5 ] || : >"/var/lib/systemd/linger/$5"

if [ "$uid" = 0 ]; then map=; else map="unshare --user --map-user=$uid --map-group=$uid"; fi
(
    sh -c 'echo "$PPID" >"$1"' sh "$group/cgroup.procs" # this subshell, before it gets namespaces
    # shellcheck disable=SC2016,SC2086 # $map is no word or several
    exec unshare --cgroup --mount sh -ec 'mount -t cgroup2 none /sys/fs/cgroup; exec "$@"' sh \
        $map "$systemd" --user --log-target=console
) </dev/null &
manager=$!

cat >/dev/null || : # until our owner closes it, or has ended

kill "$manager" 2>/dev/null || :
rounds=0
while kill -0 "$manager" 2>/dev/null && [ "$rounds" -lt 100 ]; do
    sleep 0.1
    rounds=$((rounds + 1))
done
if [ -e "$group/cgroup.kill" ]; then
    echo 1 >"$group/cgroup.kill"
else # before Linux 5.14
    find "$group" -name cgroup.procs -exec cat {} + | xargs --no-run-if-empty kill -KILL || :
fi
wait "$manager" || :
rounds=0
until find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || [ "$rounds" -ge 50 ]; do
    sleep 0.1
    rounds=$((rounds + 1))
done
