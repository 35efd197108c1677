/* What a forked child must not keep: a list of things that it clears, and the lock under
 * which they change.
 *
 * Descriptors that a child inherits keep a dead rank's connections open. So every system
 * call that makes or ends a descriptor of an entry runs under the lock, which fork takes
 * too: the child never finds one that its entry does not know. */
#ifndef CP_CONTROL_MEET_FORK_H
#define CP_CONTROL_MEET_FORK_H

/* First member of what is to be cleared. */
struct cp_fork_entry {
    struct cp_fork_entry *next;
    /* Called in the child, under the lock. */
    void (*clear)(struct cp_fork_entry *entry);
};

/* Before the first entry; any number of times. 0, or the errno of pthread_atfork. */
int cp_fork_watch(void);

void cp_fork_lock(void);
void cp_fork_unlock(void);

/* Both under the lock. Removing what is not in the list does nothing. */
void cp_fork_add(struct cp_fork_entry *entry);
void cp_fork_remove(struct cp_fork_entry *entry);

#endif
