/* The list that a forked child clears. */
#include "control/meet_fork.h"

#include <pthread.h>
#include <stddef.h>

/* Guards the list and all descriptors of all entries; held across fork. */
static pthread_mutex_t fork_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct cp_fork_entry *fork_entries;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static int fork_error;

void cp_fork_lock(void)
{
    (void)pthread_mutex_lock(&fork_mutex);
}

void cp_fork_unlock(void)
{
    (void)pthread_mutex_unlock(&fork_mutex);
}

static void after_fork_in_child(void)
{
    for (struct cp_fork_entry *entry = fork_entries; entry != NULL;
         entry = entry->next) {
        entry->clear(entry);
    }
    cp_fork_unlock();
}

static void watch_forks(void)
{
    fork_error = pthread_atfork(cp_fork_lock, cp_fork_unlock, after_fork_in_child);
}

int cp_fork_watch(void)
{
    (void)pthread_once(&fork_once, watch_forks);
    return fork_error;
}

void cp_fork_add(struct cp_fork_entry *entry)
{
    entry->next = fork_entries;
    fork_entries = entry;
}

void cp_fork_remove(struct cp_fork_entry *entry)
{
    for (struct cp_fork_entry **link = &fork_entries; *link != NULL;
         link = &(*link)->next) {
        if (*link == entry) {
            *link = entry->next;
            break;
        }
    }
}
