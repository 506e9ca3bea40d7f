# shellcheck shell=sh disable=SC2030,SC2031  # subshells keep their variables to themselves on purpose
# The marker in plain POSIX sh, for scripts of ranks:  . "$ALLOCD_SH"
#
# The marker is the file that tells every rank how the coordinator ended: the exit code in decimal on
# a first line of its own, then lines `key=value`. Only a complete first line counts, so a file that
# is being written (`echo 0 > file` makes it empty first) is "not yet"; a marker of another attempt is
# ignored. The rules are those of supervisor/core/marker.py, and a test compares the two.
#
#   allocd_marker_publish CODE   write it, once; the first one counts. A failure that was noted before is
#                                published instead of CODE. 0: a marker of this attempt stands; 65: a file
#                                that is no marker has the name; 1: it could not be written
#   allocd_marker_note CODE      remember the first part that failed (`run_part || allocd_marker_note $?`);
#                                0 changes nothing
#   allocd_marker_read           print its code; 75: not yet; 65: garbage
#   allocd_marker_wait [PID]     wait for it and return its code; give up when PID is gone and left none (1),
#                                when garbage stays (65), or at the deadline (124)
#   allocd_worker PID            for a worker: wait for the marker while its engine PID (a child of this
#                                shell) lives, then stop the engine (TERM, the grace, KILL) and return the
#                                marker's code. An engine that dies first: look on for a while, then return
#                                the engine's code, or 1 if that was 0. With `trap : TERM` in the script, a
#                                supervisor's TERM to the group ends it in the same way: the engine is stopped
#                                and the marker's code returned, or 143 if no marker comes
#
# 78 is returned for wrong use. Settings, in seconds, whole numbers except the first:
#   ALLOCD_MARKER_POLL 1 (between looks)      ALLOCD_MARKER_RECHECK 5 (looks after a death, 0..60)
#   ALLOCD_MARKER_TIMEOUT 14400 (of a wait)   ALLOCD_MARKER_GRACE 30 (from TERM to KILL)
# The file is $ALLOCD_MARKER; the attempt $ALLOCD_RUN_ID, else the same id made of Slurm's variables.
#
# Safe under `set -eu`. Functions have subshells for bodies, so options, variables and IFS of the script
# stay as they were; only names that begin with allocd_ are defined. Needs Linux's /proc and, of other
# programs, dd, ln, mv, rm, sleep, tr, uname and date. Durable files: `dd conv=fsync` syncs the content;
# a node that crashes may lose the name, and never leaves an empty marker.

# In the functions below that begin with two underscores: $path $attempt, and results in
# $found (marker | not_yet | garbage | foreign), $code, $reason.

allocd__setup() { # PATH: the state of one subshell
  set +e
  set +f
  set -u
  IFS=' 	
'
  LC_ALL=C
  export LC_ALL
  allocd__nl='
'
  path=$1
  if [ -z "$path" ]; then
    allocd__say 'no marker file: set ALLOCD_MARKER, as the engine does'
    return 78
  fi
  case $path in
    /*) ;;
    *) path=./$path ;; # never an option of a program
  esac
  attempt=${ALLOCD_RUN_ID:-}
  if [ -z "$attempt" ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    attempt=$SLURM_JOB_ID
    # The raw id of an array's last task is the array's own.
    case ${SLURM_ARRAY_JOB_ID:-none}${SLURM_ARRAY_TASK_ID:-none} in
      *[!0-9]*) ;;
      *) attempt=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID ;;
    esac
    case ${SLURM_RESTART_COUNT:-0} in
      0) ;;
      *) attempt=$attempt.r$SLURM_RESTART_COUNT ;;
    esac
  fi
}

allocd__say() {
  printf 'allocd marker: %s\n' "$1" >&2
}

allocd__is_code() {
  case $1 in
    [0-9] | [1-9][0-9] | 1[0-9][0-9] | 2[0-4][0-9] | 25[0-5]) return 0 ;;
  esac
  return 1
}

allocd__is_number() { # whole seconds
  case $1 in
    '' | *[!0-9]* | ??????????*) return 1 ;;
  esac
}

# By listing the directory, which makes a network client ask its server; asking for a missing name
# would keep it missing for up to a minute.
allocd__listed() { # PATH
  for allocd__entry in "$1"*; do
    [ "$allocd__entry" = "$1" ] || continue
    [ -e "$1" ] || [ -h "$1" ] || return 1 # gone again
    return 0
  done
  return 1
}

allocd__look() { # PATH
  found=not_yet code='' reason=absent
  allocd__listed "$1" || return 0
  if [ -h "$1" ] || [ ! -f "$1" ]; then
    found=garbage reason='it is not a regular file'
    return 0
  fi
  # Bytes of zero would vanish in a shell variable: they become \001, and what was \001 stays garbage.
  allocd__text=$(dd if="$1" bs=4097 count=1 2>/dev/null | tr '\000\001' '\001\002'; printf x)
  allocd__text=${allocd__text%x}
  allocd__parse
}

allocd__parse() {
  allocd__zero=$(printf '\001')
  if [ "${#allocd__text}" -gt 4096 ]; then
    found=garbage reason='more than 4096 bytes'
    return 0
  fi
  case $allocd__text in
    *[!"$allocd__zero"]*) ;;
    *)
      reason='empty'
      return 0
      ;;
  esac
  case $allocd__text in
    *"$allocd__nl"*) ;;
    *)
      reason='the first line is not complete'
      [ "${#allocd__text}" -le 16 ] || found=garbage reason='the first line has no end'
      return 0
      ;;
  esac
  code=${allocd__text%%"$allocd__nl"*}
  allocd__rest=${allocd__text#*"$allocd__nl"}
  if ! allocd__is_code "$code"; then
    found=garbage code='' reason='the first line is not a number 0..255 alone'
    return 0
  fi
  found=marker
  [ -z "$attempt" ] || allocd__bind
}

allocd__bind() {
  while :; do
    case $allocd__rest in
      *"$allocd__nl"*) ;;
      '') return 0 ;; # names no attempt: believed
      *)
        found=not_yet code='' reason='the lines below the code are not complete'
        return 0
        ;;
    esac
    allocd__line=${allocd__rest%%"$allocd__nl"*}
    allocd__rest=${allocd__rest#*"$allocd__nl"}
    case $allocd__line in
      "attempt=$attempt") return 0 ;;
      'attempt= '* | 'attempt='*' ' | 'attempt=' | 'attempt='*[!\ -~]*) ;; # not a value: skipped
      attempt=*)
        [ "${#allocd__line}" -le 520 ] || continue
        found=foreign reason="it is of attempt ${allocd__line#attempt=}, not $attempt"
        code=''
        return 0
        ;;
    esac
  done
}

# Write a whole marker under a name of its own in the same directory; sets $temporary.
allocd__write() { # PATH CODE BY
  allocd__dir=${1%/*}
  allocd__base=${1##*/}
  allocd__host=${SLURMD_NODENAME:-$(uname -n)}
  allocd__text=$2
  [ -z "$attempt" ] || allocd__text="$allocd__text${allocd__nl}attempt=$attempt"
  case ${ALLOCD_RANK:-} in
    '' | *[!0-9]* | ??????????* | 0?*) ;;
    *) allocd__text="$allocd__text${allocd__nl}rank=$ALLOCD_RANK" ;;
  esac
  allocd__text="$allocd__text${allocd__nl}host=$allocd__host${allocd__nl}by=coordinator"
  allocd__text="$allocd__text${allocd__nl}at=$(date -u +%Y-%m-%dT%H:%M:%SZ)"
  allocd__try=0
  while :; do
    temporary=$allocd__dir/.$allocd__base.$allocd__host.$$.$allocd__try.tmp
    (set -C && : >"$temporary") 2>/dev/null && break # exclusive
    allocd__try=$((allocd__try + 1))
    if [ "$allocd__try" -gt 20 ]; then
      allocd__say "$allocd__dir: no file can be made here"
      return 1
    fi
  done
  printf '%s\n' "$allocd__text" | dd of="$temporary" conv=fsync 2>/dev/null
  # Programs differ in how they report a full disk; what can be read back is there.
  allocd__back=$(cat "$temporary" 2>/dev/null; printf x)
  [ "$allocd__back" = "$allocd__text${allocd__nl}x" ] && return 0
  rm -f "$temporary"
  allocd__say "$1: it could not be written (is the disk full?)"
  return 1
}

# Give the temporary file its name unless that is taken: by a link, which refuses to replace, or a
# rename where links are refused. Either way the caller reads back who has the name now.
allocd__claim() { # PATH
  if ! ln "$temporary" "$1" 2>/dev/null && ! allocd__listed "$1"; then
    mv -n "$temporary" "$1" 2>/dev/null
    allocd__listed "$1" || mv -f "$temporary" "$1" 2>/dev/null
  fi
  rm -f "$temporary"
}

allocd__publish() { # PATH CODE
  allocd__look "$1"
  if [ "$found" = not_yet ] && [ "$reason" = absent ]; then
    allocd__write "$1" "$2" || return 1
    allocd__claim "$1"
    allocd__look "$1"
  fi
  if [ "$found" = foreign ]; then # it counts for nobody in this attempt
    allocd__write "$1" "$2" || return 1
    mv -f "$temporary" "$1" || rm -f "$temporary"
    allocd__look "$1"
  fi
  case $found in
    marker) return 0 ;;
    not_yet) [ "$reason" != absent ] || return 1 ;;
  esac
  allocd__say "$1: the name is taken and holds no marker: $reason"
  return 65
}

# The first failure noted beside the marker, in $noted; a note that makes no sense is still one.
allocd__noted() { # PATH
  allocd__look "$1.note"
  case $found:$reason in
    marker:*) noted=$code ;;
    not_yet:absent | foreign:*) noted=0 ;;
    *) noted=1 ;;
  esac
}

allocd__alive() { # PID: a process that has ended and was not waited for is not alive
  kill -0 "$1" 2>/dev/null || return 1
  allocd__state=''
  # To the end of the file: what bash has read ahead and cannot give back, because the process has just gone, it would
  # hand to the next read of another file.
  while read -r allocd__line; do
    case $allocd__line in State:*) allocd__state=$allocd__line ;; esac
  done 2>/dev/null <"/proc/$1/status"
  case $allocd__state in '' | State:?[ZX]*) return 1 ;; esac
}

allocd__now() { # whole seconds since the machine's start, in $now; a clock that is set does not move it
  read -r now </proc/uptime
  now=${now%%.*}
}

allocd_marker_publish() (
  allocd__setup "${ALLOCD_MARKER:-}" || exit
  if ! allocd__is_code "${1:-}"; then
    allocd__say "publish: expected an exit code 0..255, found '${1:-}'"
    exit 78
  fi
  allocd__noted "$path"
  [ "$noted" = 0 ] || set -- "$noted"
  allocd__publish "$path" "$1"
)

allocd_marker_note() (
  allocd__setup "${ALLOCD_MARKER:-}" || exit
  if ! allocd__is_code "${1:-}"; then
    allocd__say "note: expected an exit code 0..255, found '${1:-}'"
    exit 78
  fi
  [ "$1" != 0 ] || exit 0
  allocd__publish "$path.note" "$1" 2>/dev/null
  allocd__noted "$path"
  [ "$noted" != 0 ] && exit 0
  allocd__say "$path.note: the failure could not be noted"
  exit 1
)

allocd_marker_read() (
  allocd__setup "${ALLOCD_MARKER:-}" || exit
  allocd__look "$path"
  case $found in
    marker) printf '%s\n' "$code" ;;
    garbage)
      allocd__say "$path: no marker: $reason"
      exit 65
      ;;
    *) exit 75 ;;
  esac
)

allocd__sleep() {
  sleep "${ALLOCD_MARKER_POLL:-1}" 2>/dev/null || sleep 1
}

# The whole wait. Prints how it ended and the code that follows: `marker CODE`, `dead 1`, `garbage 65`,
# `deadline 124` or `misuse 78`, for a code alone may mean any of them.
allocd__wait() ( # PID or nothing
  allocd__setup "${ALLOCD_MARKER:-}" || { echo misuse 78; exit; }
  allocd__pid=${1:-}
  allocd__recheck=${ALLOCD_MARKER_RECHECK:-5}
  allocd__timeout=${ALLOCD_MARKER_TIMEOUT:-14400}
  for allocd__number in "${allocd__pid:-1}" "$allocd__recheck" "$allocd__timeout"; do
    allocd__is_number "$allocd__number" && continue
    allocd__say "wait: expected a process id, or whole seconds in the settings, found '$allocd__number'"
    echo misuse 78
    exit
  done
  allocd__now
  allocd__deadline=$((now + allocd__timeout))
  allocd__dead='' allocd__garbage=''
  while :; do
    # Liveness before the look: a coordinator that writes and dies has then been seen to write.
    if [ -n "$allocd__pid" ] && [ -z "$allocd__dead" ] && ! allocd__alive "$allocd__pid"; then
      allocd__now
      allocd__dead=$((now + allocd__recheck))
    fi
    allocd__look "$path"
    allocd__now
    if allocd__decide; then
      [ "$found" = marker ] || allocd__say "$path: no marker: $reason"
      exit
    fi
    allocd__sleep
  done
)

allocd__decide() { # the rules of Patience in supervisor/core/marker.py; prints the end, or returns 1
  case $found in
    marker)
      echo marker "$code"
      return 0
      ;;
    garbage)
      allocd__garbage=${allocd__garbage:-$((now + 2))}
      if [ "$now" -ge "$allocd__garbage" ] || [ "$now" -ge "${allocd__dead:-$((now + 1))}" ]; then
        echo garbage 65
        return 0
      fi
      ;;
    *)
      allocd__garbage=''
      if [ "$now" -ge "${allocd__dead:-$((now + 1))}" ]; then
        echo dead 1
        return 0
      fi
      ;;
  esac
  [ "$now" -ge "$allocd__deadline" ] || return 1
  echo deadline 124
}

allocd_marker_wait() (
  set +e
  allocd__ended=$(allocd__wait "$@")
  exit "${allocd__ended##* }"
)

# The engine and, if it leads a process group of its own, the whole group: TERM, the grace, KILL.
allocd__stop() ( # PID
  allocd__setup . || exit
  allocd__grace=${ALLOCD_MARKER_GRACE:-30}
  allocd__is_number "$allocd__grace" || allocd__grace=30
  allocd__now
  allocd__deadline=$((now + allocd__grace))
  allocd__kill TERM "$1"
  while allocd__alive "$1" || allocd__group "$1"; do
    allocd__now
    if [ "$now" -ge "$allocd__deadline" ]; then
      allocd__kill KILL "$1"
      break
    fi
    allocd__sleep
  done
)

allocd__kill() { # SIGNAL PID: the one spelling that dash, busybox and bash take for a group
  kill "-$1" "-$2" 2>/dev/null || kill "-$1" "$2" 2>/dev/null
}

# Whether anyone lives in the process group: a leader may end before its children. Zombies do not count,
# for in a container nobody may ever collect them.
allocd__group() { # PGID
  kill -0 "-$1" 2>/dev/null || return 1
  for allocd__entry in /proc/[0-9]*/stat; do
    read -r allocd__line 2>/dev/null <"$allocd__entry" || continue
    # "PID (NAME) STATE PPID PGRP ...": the name may hold anything, a parenthesis included
    allocd__line=${allocd__line##*) }
    case $allocd__line in
      [ZX]' '*) ;;
      ?' '*' '"$1"' '*)
        allocd__line=${allocd__line#? * }
        [ "${allocd__line%% *}" != "$1" ] || return 0
        ;;
    esac
  done
  return 1
}

# Not a subshell: only the shell whose child the engine is can wait for it.
allocd_worker() { # PID
  # Nothing is printed by a wait that a signal to the group killed.
  allocd__ended=$(allocd__wait "${1:-none}") || :
  case $allocd__ended in
    misuse*) return 78 ;;
    'dead '*) ;;
    *) allocd__stop "$1" ;;
  esac
  allocd__code=0
  wait "$1" || allocd__code=$?
  case $allocd__ended in
    'dead '*) [ "$allocd__code" -ne 0 ] || allocd__code=1 ;; # an engine must not end before the job may
    '') allocd__code=$(allocd__late) || : ;;
    *) allocd__code=${allocd__ended##* } ;;
  esac
  unset allocd__ended
  return "$allocd__code"
}

allocd__late() ( # the code of a marker that comes within the time of a second look; else a death by TERM
  ALLOCD_MARKER_TIMEOUT=${ALLOCD_MARKER_RECHECK:-5}
  allocd__ended=$(allocd__wait 2>/dev/null) || :
  case $allocd__ended in
    'marker '*) echo "${allocd__ended##* }" ;;
    *) echo 143 ;;
  esac
)
